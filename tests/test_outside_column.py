"""Columns that a module outside declares flow from replies and steps to a loss, and nothing in between names them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from algos.registry import NoOptions
from algos.types import LossInputs, LossResult
from experiments.columns import token_columns
from rl.config.schema import ConfigError, load_config
from rl.learner.algorithm import make_algorithm
from rl.learner.batches import check_batch_part
from rl.learner.update import loss_inputs
from rl.models.packing import Pack, dummy_pack, make_packs, split_minibatches
from rl.models.protocol import PolicyOutput
from rl.observe.alarms import RunAlarm
from rl.store.batch_files import read_batch_parts, write_batch_part
from rl.wire.columns import (
    COLUMNS,
    Column,
    context_columns,
    forward_columns,
    register,
    register_configured,
    shape_by_model,
)
from rl.wire.messages import (
    BatchPart,
    Generate,
    Generated,
    SampleRow,
    Ticket,
    Trajectory,
    Turn,
    Version,
    decode,
    encode,
)
from rl.wire.run import RunFile
from rollout.broker.actions import BatchSample, EmitBatch
from rollout.broker.assembly import make_batch_parts, outcome_of
from rollout.broker.validation import fault
from rollout.episodes.conversation import Conversation
from rollout.episodes.environment import ChatMessage, Step
from rollout.episodes.episode import EpisodeContext, run_episode
from rollout.episodes.tokenizer import IdTokenizer
from rollout.episodes.turns import EpisodeFailed
from tests import outside_columns
from tests.conftest import MakeRun
from tests.outside_columns import DIFFICULTY, GRADE, HINTS, ROUTED_EXPERTS, TEACHER_LOGP
from tests.rollout.trajectories import reply_columns, with_sequence

MODULE = outside_columns.__name__
NAMES = ("TEACHER_LOGP", "ROUTED_EXPERTS", "GRADE", "HINTS", "DIFFICULTY", "STUDENT_GAP")
SETTINGS = (
    f"algo.columns=[{', '.join(f'{MODULE}:{name}' for name in NAMES)}]",
    f"algo.loss={__name__}:distil",
    "env.max_turns=2",
    "rollout.group_size=2",
)


def distil(inputs: LossInputs, options: NoOptions) -> LossResult:
    """A loss that reads every one of them."""
    columns = inputs.columns
    gap = columns["teacher_logp"] - inputs.logp_current + columns["student_gap"]
    experts = columns["routed_experts"].sum((1, 2))
    return LossResult(gap * columns["grade"] + experts * columns["hints"] + columns["difficulty"])


pytestmark = pytest.mark.usefixtures("own_table")


def teacher_logp(ids: list[int]) -> np.ndarray:
    return -np.array(ids, np.float32) / 8


def routed_experts(ids: list[int]) -> np.ndarray:
    return np.arange(len(ids), dtype=np.uint8)[:, None, None] + np.zeros((2, 3), np.uint8)


async def answer(request: Generate) -> Generated:
    """Two ids a turn, that depend on the sample and the turn."""
    ids = [10 + request.session, 20 + len(request.prompt_ids)]
    columns = reply_columns(ids, version=request.version.n)
    columns |= {"teacher_logp": teacher_logp(ids), "routed_experts": routed_experts(ids)}
    return Generated(
        request_id=request.request_id,
        session=request.session,
        columns=columns,
        timeline=0,
        finish_reason="stop",
        tokens_generated=len(ids),
        generator=0,
    )


class Graded:
    """Two turns; the grade is the turn's number, hints and difficulty are those of the last step."""

    def __init__(self, **without: Any) -> None:
        self.turns = 0
        self.without = without

    async def reset(self, task: Any) -> list[ChatMessage]:
        return [ChatMessage("user", "1 2 3")]

    async def step(self, action: str, truncated: bool = False) -> Step:
        self.turns += 1
        columns = {"grade": self.turns, "hints": 10 * self.turns, "difficulty": 0.25 * self.turns}
        return Step([ChatMessage("user", "4")], 1.0, self.turns == 2, True, columns=columns | self.without)

    async def close(self) -> None:
        pass


def ticket_of(number: int) -> Ticket:
    return Ticket(number, number, number // 2, 0, Version(0, 3))


def complaint(trajectory: Trajectory) -> str:
    """What the broker would say of it."""
    return fault(trajectory, ticket_of(trajectory.ticket_id), newest=Version(0, 3), vocabulary=1 << 31)


def play(ticket_id: int = 0, environment: Graded | None = None, generate: Any = answer) -> Trajectory:
    context = EpisodeContext(load_config(None, [*SETTINGS]), IdTokenizer(), generate)
    return asyncio.run(run_episode(ticket_of(ticket_id), lambda: environment or Graded(), None, context))


def batch_parts_of(trajectories: list[Trajectory], ranks: int) -> list[BatchPart]:
    samples = [BatchSample(i, i // 2, 0, 3, outcome_of(one)) for i, one in enumerate(trajectories)]
    return make_batch_parts(EmitBatch(3, samples, {}), timeline=0, ranks=ranks)


def losses_of(pack: Pack) -> torch.Tensor:
    """(T,) under a policy whose every log-probability is -1."""
    algorithm = make_algorithm(load_config(None, [*SETTINGS]))
    output = PolicyOutput(torch.full((pack.tokens,), -1.0), torch.zeros(pack.tokens))
    pack = pack.with_columns(student_gap=torch.full((pack.tokens,), 0.125))
    inputs = loss_inputs(pack, output, needs_proximal=False)
    return inputs.masked(algorithm.loss(inputs).per_token)


def test_from_a_reply_to_a_loss(tmp_path: Path) -> None:
    register_configured(load_config(None, [*SETTINGS]).algo.columns)
    trajectories = [play(i) for i in range(4)]
    assert [complaint(trajectory) for trajectory in trajectories] == [""] * 4
    sent = [decode([bytes(frame) for frame in encode(trajectory)]) for trajectory in trajectories]
    received = [trajectory for trajectory in sent if isinstance(trajectory, Trajectory)]

    sequence = received[1].sequence
    # 1 2 3 · 11 23 · 4 · 11 26: prompt, turn, answer of the environment, turn
    assert sequence.token_ids.tolist() == [1, 2, 3, 11, 23, 4, 11, 26]
    expected = [0.5, 0.5, 0.5, -11 / 8, -23 / 8, 0.5, -11 / 8, -26 / 8]
    assert sequence.columns["teacher_logp"].tolist() == expected
    assert sequence.columns["routed_experts"][:, 1, 2].tolist() == [255, 255, 255, 0, 1, 255, 0, 1]
    assert sequence.columns["grade"].tolist() == [1.0, 2.0] and sequence.columns["hints"].tolist() == [20]
    assert received[1].columns["difficulty"].tolist() == [0.5]

    found = {}
    for batch_part in batch_parts_of(received, ranks=2):
        check_batch_part(batch_part, step=3, rank=batch_part.rank, timeline=0, staleness_bound=0)
        write_batch_part(tmp_path, batch_part)
    for batch_part in read_batch_parts(tmp_path):
        for part in split_minibatches(batch_part, 2):
            for pack in make_packs(part, 64, version=3):
                losses = losses_of(pack)
                for place, member in enumerate(pack.members):
                    found[member] = losses[pack.sample == place].tolist()

    assert found.keys() == {0, 1, 2, 3}
    for member, member_losses in found.items():
        generated = [10 + member, 23, 10 + member, 26]
        gaps = [-(token / 8) + 1 + 0.125 for token in generated]
        by_hand = [gap * (1 + place // 2) + 6 * (place % 2) * 20 + 0.5 for place, gap in enumerate(gaps)]
        assert member_losses == pytest.approx([0, 0, 0, *by_hand[:2], 0, *by_hand[2:]])
    assert losses_of(dummy_pack()).tolist() == [0.0]


def test_of_a_turn_in_several_parts_the_last_one_with_tokens_speaks() -> None:
    register(Column("decode_speed", "float32", masked=-1, scope="turn"))
    conversation = Conversation(IdTokenizer(), [ChatMessage("user", "1 2")])
    turn = Turn(2, 4, 0.0, 0.0, 0.0, "stop", 0)

    for ids, speed in (([3], 10), ([4], 20), ([], -1)):
        conversation.append_generated(reply_columns(ids) | {"decode_speed": np.array([speed], np.float32)})
    conversation.end_turn(turn, {})
    conversation.append_messages([ChatMessage("user", "5")], limit=99)
    for ids, speed in (([], -1), ([6], 30)):
        conversation.append_generated(reply_columns(ids) | {"decode_speed": np.array([speed], np.float32)})
    conversation.end_turn(turn, {})

    assert conversation.sequence().columns["decode_speed"].tolist() == [20, 30]


def test_a_column_that_is_not_in_the_table_is_refused_everywhere() -> None:
    with pytest.raises(EpisodeFailed, match=r"generator 0 .*'(routed_experts|teacher_logp)' is not registered.*algo"):
        play()
    register(TEACHER_LOGP)
    register(ROUTED_EXPERTS)
    with pytest.raises(EpisodeFailed, match=r"step of turn 1 .*'grade' is not registered: .*algo.columns"):
        play()
    for column in (GRADE, HINTS, DIFFICULTY):
        register(column)
    with pytest.raises(EpisodeFailed, match=r"step of turn 1 .*'colour' is not registered"):
        play(environment=Graded(colour=1.0))
    with pytest.raises(ValueError, match="'colour' is not registered"):
        dummy_pack().with_columns(colour=torch.zeros(1))

    good = play()
    assert "'colour' is not registered" in complaint(with_sequence(good, colour=np.zeros(8, np.float32)))
    (batch_part,) = batch_parts_of([good, good], ranks=1)
    stranger = structs.replace(batch_part, columns=batch_part.columns | {"colour": np.zeros(16, np.float32)})
    with pytest.raises(RunAlarm, match="batch-contradicts: step 3: column 'colour' is not registered"):
        check_batch_part(stranger, step=3, rank=0, timeline=0, staleness_bound=0)


def test_a_registered_column_that_nobody_made_is_named() -> None:
    register_configured(load_config(None, [*SETTINGS]).algo.columns)

    async def forgetful(request: Generate) -> Generated:
        reply = await answer(request)
        return structs.replace(reply, columns=reply_columns(reply.token_ids.tolist()))

    with pytest.raises(EpisodeFailed, match=r"generator 0 .*'teacher_logp' is missing: .*made by the generator"):
        play(generate=forgetful)

    class Silent(Graded):
        async def step(self, action: str, truncated: bool = False) -> Step:
            return Step([], 1.0, True, True)

    with pytest.raises(EpisodeFailed, match=r"step of turn 1 .*'grade' is missing: .*made by the environment"):
        play(environment=Silent())
    with pytest.raises(EpisodeFailed, match=r"step of turn 1 .*'grade'.*could not convert"):
        play(environment=Graded(grade="good"))

    good = play()
    without = {name: values for name, values in good.sequence.columns.items() if name != "teacher_logp"}
    assert "'teacher_logp' is missing" in complaint(
        structs.replace(good, sequences=[structs.replace(good.sequence, columns=without)])
    )
    nan = with_sequence(good, teacher_logp=np.full(8, np.nan, np.float32))
    assert complaint(nan) == "teacher_logp is not finite"
    assert "routed_experts is uint8(8,)" in complaint(with_sequence(good, routed_experts=np.zeros(8, np.uint8)))
    late = structs.replace(good, columns={"difficulty": np.zeros(2, np.float32)})
    assert "difficulty is float32(2,), expected float32(1,)" in complaint(late)


def test_the_loss_is_checked_against_the_table_before_anything_starts() -> None:
    with pytest.raises(ValueError, match=r"uses teacher_logp, which nothing here computes: list .* under algo.columns"):
        make_algorithm(load_config(None, [*SETTINGS[1:]]))
    assert make_algorithm(load_config(None, [*SETTINGS])).loss.spec.function is distil


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (f"{MODULE}:NOTHING", "no 'NOTHING' in it"),
        (f"{MODULE}:annotations", "is a _Feature, not a rl.wire.columns.Column"),
        (f"{MODULE}:TWICE", "'logp_behavior' is registered twice"),
    ],
)
def test_a_name_that_is_no_column_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        register_configured([name])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "two words"}, "must be an identifier"),
        ({"dtype": "float64"}, "float64 is none of int32, int64, float32, uint8"),
        ({"producer": "environment"}, "knows no tokens"),
        ({"producer": "learner", "scope": "turn"}, "an entry per token"),
        ({"producer": "nobody"}, "unknown producer 'nobody'; one of generator, environment"),
        ({"scope": "word"}, "unknown scope 'word'; one of token, turn"),
        ({"covers": "prompts"}, "unknown covers 'prompts'; one of sampled, context"),
        ({"reads": "critic"}, "unknown reads 'critic'; one of loss, forward"),
        ({"covers": "context", "scope": "turn"}, "a generator reads; it is made by the generator for each turn"),
        ({"covers": "context", "producer": "learner"}, "it is made by the learner for each token"),
        ({"shape": (2, 0)}, "shape holds 0; give sizes, or fields of the model's config"),
    ],
)
def test_impossible_declarations_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Column(**{"name": "ok", "dtype": "float32"} | fields)


def test_a_column_is_declared_again_only_alike() -> None:
    register(TEACHER_LOGP)
    register(Column("teacher_logp", "float32", masked=0.5))
    with pytest.raises(ValueError, match="registered twice"):
        register(Column("teacher_logp", "float32", masked=0.0))


def test_the_columns_that_the_forward_reads_are_named() -> None:
    register(Column("routes", "uint16", covers="context", reads="forward"))
    register(Column("difficulty", "float32", producer="environment", scope="sample", reads="forward"))
    register(TEACHER_LOGP)
    assert [column.name for column in forward_columns()] == ["routes", "difficulty"]
    assert [column.name for column in context_columns()] == ["routes"]


def test_two_bytes_cross_a_socket_and_reach_a_pack() -> None:
    """The largest values of uint16 are no negative numbers anywhere."""
    register(Column("routes", "uint16", shape=(2,)))
    routes = np.array([[0, 65535], [256, 32768]], np.uint16)
    columns = token_columns([1, 2], [0, 1], policy_version=3) | {"routes": routes}
    part = BatchPart(
        step=3,
        rank=0,
        timeline=0,
        rows=[SampleRow(0, 0, 1.0, 2, 1, 3)],
        members=[0],
        lengths=[2],
        turn_starts=[[1]],
        columns=columns,
        loss_tokens=1,
    )

    received = decode([bytes(frame) for frame in encode(part)])
    assert isinstance(received, BatchPart) and received.columns["routes"].dtype == np.uint16
    (pack,) = make_packs(received, 8, version=3)
    assert pack.columns["routes"].tolist() == routes.tolist()
    assert (pack.columns["routes"] + 1).max() == 65536


def model_of(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_shape_comes_from_the_model(tmp_path: Path) -> None:
    column = Column("routes", "uint8", shape=("num_hidden_layers", "num_experts_per_tok", 2))
    register(column)
    with pytest.raises(ValueError, match=r"'routes': its shape .* comes from a model, and none is known here"):
        column.full(1)

    shape_by_model(model_of(tmp_path, text_config={"num_hidden_layers": 3, "num_experts_per_tok": 4}))
    assert COLUMNS["routes"].full(5).shape == (5, 3, 4, 2)
    register(column)  # as every part of a process does that reads `algo.columns`
    assert COLUMNS["routes"].entry_shape == (3, 4, 2)
    with pytest.raises(ValueError, match="registered twice"):
        register(Column("routes", "uint8", shape=(3, 5, 2)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "'routes': shape names 'layers', but the model's config.json has no 'layers' in"),
        ({"layers": 2.5}, "'routes': shape names 'layers', but the model's config.json has layers=2.5 in"),
        (None, "'routes' takes its shape .* from the model, and this run has none; declare it in numbers"),
    ],
)
def test_a_shape_that_the_model_does_not_have_is_one_line(tmp_path: Path, fields: Any, message: str) -> None:
    register(Column("routes", "uint8", shape=("layers",)))
    with pytest.raises(ConfigError, match=f"algo.columns: column {message}"):
        shape_by_model(None if fields is None else model_of(tmp_path, **fields))


def test_every_process_reads_the_shape_from_the_run_file(tmp_path: Path, make_run: MakeRun) -> None:
    named = f"algo.columns=[{MODULE}:OF_MODEL]"
    run = make_run(named, model_folder=model_of(tmp_path, layers=5))
    RunFile.load(run.folder)
    assert COLUMNS["of_model"].full(3).shape == (3, 5, 2)
    assert make_algorithm(run.config), "the learner registers it again"

    del COLUMNS["of_model"]
    with pytest.raises(ConfigError, match=r"'of_model' takes its shape .* and this run has none"):
        RunFile.load(make_run(named).folder)


def test_every_process_of_a_run_knows_it(tmp_path: Path) -> None:
    """The simulated engine answers masked values; the batch part that was trained holds them for every token."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", f"runs={tmp_path}", "steps=3"]
    columns = f"algo.columns=[{MODULE}:TEACHER_LOGP, {MODULE}:ROUTED_EXPERTS]"
    done = subprocess.run(
        [*command, columns, "tracking.replay=full"], cwd=root, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert json.loads((tmp_path / "simulated" / "summary.json").read_text())["steps"] == 3

    register(TEACHER_LOGP)
    register(ROUTED_EXPERTS)
    batch_parts = list(read_batch_parts(tmp_path / "simulated"))
    assert len(batch_parts) >= 3
    for batch_part in batch_parts:
        assert (batch_part.columns["teacher_logp"] == 0.5).all()
        assert batch_part.columns["routed_experts"].shape == (sum(batch_part.lengths), 2, 3)

"""A recorded run trained again: what it computed to the last bit, and what a changed one would have."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from algos.registry import NoOptions
from algos.types import LossInputs, LossResult
from launch.cli import main
from rl.config.schema import ConfigError
from rl.replay.recorded import Recorded, dealt
from rl.replay.replay import RECORDED, Request, Row, replayed
from rl.store.checkpoint_folder import steps_of
from tests.rl.learner.learner_harness import Harness
from tests.rl.replay import recording
from tests.rl.replay.recording import STEPS, batch, restart, train, without_sockets

pytestmark = pytest.mark.slow


def rows_of(folder: Path, first: int = 0, last: int = STEPS, *overrides: str, **options: object) -> list[Row]:
    recorded = Recorded(folder)
    variants = {"changed": recorded.changed(overrides)} if overrides else {}
    return list(replayed(recorded, Request(first, last, variants, **options)))  # type: ignore[arg-type]


def test_a_run_with_three_deaths_comes_out_to_the_last_bit(deadly_folder: Path) -> None:
    """Two ranks, critic, reference and two minibatches: every metric and every tensor of every version."""
    rows = rows_of(deadly_folder)
    assert [row.n for row in rows] == [0, *range(1, STEPS + 1)]
    assert all(row.identical and row.tensors == [] for row in rows)
    assert min(len(row.values) for row in rows[1:]) > 30
    assert {"critic/loss", "train/grad_norm", "loss/ess"} <= rows[1].values.keys()


def test_the_command_says_that_it_is_identical(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run_folder)]) == 0
    assert f"identical: {STEPS} steps" in capsys.readouterr().out
    assert main(["replay", str(run_folder), "--from", "3", "--to", "5"]) == 0
    assert "identical: 2 steps" in capsys.readouterr().out


def test_one_bit_in_a_batch_is_no_identical_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run")
    lines = (folder / "digests.jsonl").read_text().splitlines()
    told = json.loads(lines[4])
    name = sorted(told["tensors"])[1]
    told["tensors"][name] = f"{int(told['tensors'][name], 16) ^ 1:016x}"
    (folder / "digests.jsonl").write_text("\n".join([*lines[:4], json.dumps(told), *lines[5:]]) + "\n")

    assert main(["replay", str(folder)]) == 1
    said = capsys.readouterr()
    assert f"NOT the run's numbers, first at version 4: {name}" in said.err and "identical: " not in said.out


def test_ranks_that_compute_together_and_save_in_the_background(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They die while a checkpoint may be on its way, go on, and come out to the last bit; so does one rank, nearly."""
    sharing = ("learner.ranks=2", "learner.context_parallel=2", "algo.kl.coef=0.1")
    run = recording.begin(tmp_path, *sharing, "learner.checkpoint_every=1", "learner.checkpoints=background")
    with Harness(run) as harness:
        train(harness, 0, 4)
        begun = restart(harness)
        assert 2 <= begun <= 4
        train(harness, begun, STEPS)
        harness.finish()
    without_sockets(run.folder)
    assert max(steps_of(run.folder / "checkpoints")) == STEPS

    assert all(row.identical and row.tensors == [] for row in rows_of(run.folder))
    assert main(["replay", str(run.folder), "learner.ranks=1", "learner.context_parallel=1"]) == 0
    assert "within 0.001 of the run: the largest difference is" in capsys.readouterr().out


def test_states_on_the_host_are_replayed_there_or_on_the_device(tmp_path: Path) -> None:
    """A run of two ranks that die is trained with them, and by either setting comes out to the last bit."""
    host = ("learner.ranks=2", "learner.optimizer_states=host", "algo.kl.coef=0.1", "alarms.exact=100")
    run = recording.begin(tmp_path, *host)
    with Harness(run) as harness:
        train(harness, 0, 4)
        assert restart(harness) == 3
        train(harness, 3, STEPS)
        harness.finish()
    without_sockets(run.folder)

    assert all(row.identical and row.tensors == [] for row in rows_of(run.folder))
    recorded = (run.folder / "run.json").read_text()
    changed = recorded.replace('"optimizer_states": "host"', '"optimizer_states": "device"')
    assert changed != recorded
    (run.folder / "run.json").write_text(changed)
    assert all(row.identical and row.tensors == [] for row in rows_of(run.folder))


def test_another_number_of_ranks_stays_within_its_bound(
    deadly_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(deadly_folder), "learner.ranks=1"]) == 0
    assert "within 0.001 of the run: the largest difference is" in capsys.readouterr().out


def test_a_batch_is_dealt_for_any_number_of_ranks() -> None:
    parts = batch(2, 2)
    alone = dealt(parts, 0, 1)
    three = [dealt(parts, rank, 3) for rank in range(3)]
    assert sorted(alone.members) == sorted(member for part in three for member in part.members) == list(range(8))
    for part in (alone, *three):
        ends = np.cumsum([0, *part.lengths])
        for member, begin, end, starts in zip(part.members, ends, ends[1:], part.turn_starts, strict=False):
            (own,) = [each for each in parts if member in each.members]
            place = own.members.index(member)
            first = sum(own.lengths[:place])
            assert starts == own.turn_starts[place]
            for name, values in part.columns.items():
                assert (values[begin:end] == own.columns[name][first : first + own.lengths[place]]).all()


def test_a_changed_run_begins_where_the_run_was_and_says_when_it_has_left(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = rows_of(run_folder, 2, STEPS, "algo.loss=topr")
    base = {row.n: row for row in rows if row.variant == RECORDED}
    changed = {row.n: row for row in rows if row.variant == "changed"}
    assert all(row.identical for row in base.values()) and sorted(changed) == [3, 4, 5, 6]

    first = changed[3].values  # the same weights, before another step
    assert (first["trust/ess"], first["trust/kl"], first["gain"]) == (1.0, 0.0, 0.0)
    assert first["loss/entropy"] == base[3].values["loss/entropy"]
    assert first["train/grad_norm"] != base[3].values["train/grad_norm"]
    assert changed[6].values["trust/ess"] < 1 and changed[6].values["trust/kl"] > 0

    capsys.readouterr()
    main(["replay", str(run_folder), "--from", "2", "algo.loss=topr", "--trust", "0.9999,1"])
    said = [line for line in capsys.readouterr().out.splitlines() if "changed" in line or "BEYOND" in line]
    assert ["BEYOND TRUST" in line for line in said] == [False, True, True, True]


def test_the_same_under_another_name_stays_at_the_run(run_folder: Path) -> None:
    """From a state that was replayed to, not loaded: step 4 has no checkpoint."""
    rows = rows_of(run_folder, 4, STEPS, "algo.loss=grpo")
    same = {row.n: row.values for row in rows if row.variant == RECORDED}
    for row in rows:
        if row.variant == "changed":
            assert {name: row.values[name] for name in same[row.n]} == same[row.n]
            assert row.values["trust/ess"] == 1 and row.values["gain"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rollout.alpha=2"], "rollout.alpha=2: a replay trains what was sampled"),
        (["algo.critic={}"], "algo.critic={}: a replay"),
        (["algo.losss=grpo"], "did you mean 'loss'"),
        (["--from", "2", "--to", "9"], "needs that of step 6; it has the batches of steps 0 to 5"),
        (["--trust", "much"], "--trust much: give"),
        (["--trust", "nan,nan"], "--trust nan,nan: give"),
        (["--trail", "/nowhere/trail.json"], "--trail /nowhere/trail.json: name a file in a folder that is there"),
        (["--trail", "trail.json", "learner.lr=0.1"], "change no field"),
    ],
)
def test_what_cannot_be_is_said(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["replay", str(run_folder), *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("nats", ["nan", "-1", "much"])
def test_a_limit_that_is_none_is_refused(run_folder: Path, nats: str) -> None:
    with pytest.raises(SystemExit):
        main(["replay", str(run_folder), "--exact", nats])


def test_a_run_without_batches_is_refused(run_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run_folder, tmp_path / "run", ignore=shutil.ignore_patterns("batches"))
    with pytest.raises(ConfigError, match=r"no batch in .*batches; run it with tracking.replay=full"):
        Recorded(folder)
    told = json.loads((folder / "run.json").read_text())
    told["config"]["learner"]["kind"] = "simulated"
    (folder / "run.json").write_text(json.dumps(told))
    with pytest.raises(ConfigError, match=r"learner\.kind=simulated records no batches that could be replayed"):
        Recorded(folder)


def without(run_folder: Path, folder: Path, *patterns: str) -> Path:
    return shutil.copytree(run_folder, folder, ignore=shutil.ignore_patterns(*patterns))


def test_what_was_not_recorded_is_not_called_identical(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only what the run's folder tells can be compared, and so much is said."""
    bare = without(run_folder, tmp_path / "bare", "metrics.jsonl", "digests.jsonl")
    assert main(["replay", str(bare)]) == 1
    said = capsys.readouterr()
    assert "identical" not in said.out and "neither metrics nor digests" in said.err

    half = without(run_folder, tmp_path / "half", "digests.jsonl")
    lines = (half / "metrics.jsonl").read_text().splitlines()
    (half / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    assert main(["replay", str(half)]) == 0
    assert f"identical: 2 of {STEPS} steps" in capsys.readouterr().out

    weights = without(run_folder, tmp_path / "weights", "metrics.jsonl")
    assert main(["replay", str(weights)]) == 0
    assert f"identical: {STEPS} steps, 0 metrics each" in capsys.readouterr().out


def test_a_copy_of_a_batch_under_another_name_is_no_batch(run_folder: Path, tmp_path: Path) -> None:
    folder = without(run_folder, tmp_path / "run")
    for name in ("000001.0 (copy).msgpack", "._000001.0.msgpack", "000001.msgpack", "best.0.msgpack"):
        (folder / "batches" / name).write_bytes(b"")
    assert Recorded(folder).steps == [*range(STEPS)]


def test_a_run_whose_model_is_gone_says_so(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What does not need the model works: runs are copied to other machines, and caches are emptied."""
    folder = without(run_folder, tmp_path / "run")
    told = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(told | {"model_folder": str(tmp_path / "gone")}))
    assert main(["replay", str(folder)]) == 2
    assert "gone, which the run began with, is not there any more" in capsys.readouterr().err
    for words in (["report", str(folder)], ["top", str(folder), "--once"], ["bisect", str(folder), str(run_folder)]):
        assert main(words) == 0, words


def of_no_number(inputs: LossInputs, options: NoOptions) -> LossResult:
    return LossResult(inputs.masked(inputs.logp_current * inputs.advantages * math.nan))


def failing(inputs: LossInputs, options: NoOptions) -> LossResult:
    if inputs.logp_current.dtype.itemsize == 4:  # with a batch, not where it is tried
        raise ValueError("my own mistake")
    return LossResult(inputs.masked(inputs.logp_current * inputs.advantages))


@pytest.mark.parametrize(
    ("loss", "code", "said"),
    [
        ("toper", 2, "did you mean 'topr'"),
        (f"{__name__}:of_no_number", 2, ":of_no_number: the gradient norm of step 0 is nan; leave it out"),
        (f"{__name__}:failing", 1, "ValueError: my own mistake (/"),
    ],
)
def test_a_loss_that_fails_is_one_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str], loss: str, code: int, said: str
) -> None:
    assert main(["lab", str(run_folder), "--losses", loss, "--to", "1"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_wrong_name_is_told_before_anything_is_computed(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run_folder), "algo.advantage=nowhere:mine"]) == 2
    assert "identical" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "line", "code"),
    [
        ("metrics.jsonl", '{"train/loss": 1}', 0),
        ("metrics.jsonl", '{"step": "x", "train/loss": 1}', 0),
        ("metrics.jsonl", '{"step": null, "train/loss": 1}', 0),
        ("metrics.jsonl", '{"step": 1, "train/loss": "x"}', 1),
        ("digests.jsonl", '{"timeline": 0, "n": 1, "tensors": null}', 0),
        ("changes.jsonl", '{"step": 1, "timeline": 0, "sets": {"learner.lr": "high"}}', 2),
        ("changes.jsonl", "[1, 2]", 0),
    ],
)
def test_a_damaged_line_is_left_out_or_told_in_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], file: str, line: str, code: int
) -> None:
    folder = without(run_folder, tmp_path / "run")
    with (folder / file).open("a") as lines:
        lines.write(f"{line}\n")
    assert main(["replay", str(folder), "--to", "2"]) == code
    assert capsys.readouterr().err.count("\n") == (code > 0)


def test_a_run_that_went_on_from_a_folder_that_is_gone_begins_at_its_own_checkpoint(
    run_folder: Path, tmp_path: Path
) -> None:
    folder = without(run_folder, tmp_path / "run", "step-6")
    told = json.loads((folder / "run.json").read_text())
    told["config"]["resume"] = str(tmp_path / "gone" / "step-1")
    (folder / "run.json").write_text(json.dumps(told | {"start_step": 1}))
    with pytest.raises(ConfigError, match=r"is not there any more; take --from 3$"):
        Recorded(folder).span(1, None)
    assert Recorded(folder).span(3, None) == (3, STEPS)

"""Faults that show before the first batch, at a resume, or outside of every process; and those that nothing finds."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from envs.data import OtherData, check_data, data_of
from envs.guards import check_template
from envs.held_out import check_held_out
from envs.lengths import check_lengths
from envs.registry import make_family
from envs.server import serve
from rl.config.alarms import AlarmsConfig
from rl.config.schema import ConfigError, load_config
from rl.learner.run_client import RunClient
from rl.observe.alarms import ALARMS, Alarms, RaisedAlarm, keep_alarm, read_alarms
from rl.wire.process import Process
from rl.wire.run import RunFile
from rollout.broker.core import BrokerCore
from rollout.episodes.environment import ChatMessage
from rollout.episodes.tokenizer import ChatTokenizer
from tests.conftest import MakeRun
from tests.envs.model_folder import TEMPLATE, make_model_folder
from tests.envs.test_audit import FAULTS as VERIFIERS
from tests.envs.test_audit import Verifier, audited, members, reading, without
from tests.launch.test_supervisor import QUIET, execute
from tests.museum import reward_faults as reward_faults
from tests.museum import slow_faults as slow_faults
from tests.museum.faults import FAULTS
from tests.museum.lab import Game, Lab
from tests.rl.learner.tiny_policies import VOCAB
from tests.rl.models.tiny_families import save_family
from tests.test_end_to_end_simulated import finish, start

ELSEWHERE = {
    "optimizer-lost": "optimizer-steps",
    "data-repeated": "data-repeated",
    "eval-on-train": "eval-on-train",
    "dropout-renamed": "weights-differ",
    "dead-expert": "dead-expert",
    "verifier-by-rounding": "verifier-wrong",
    "verifier-too-strict": "verifier-wrong",
    "order-ignored": "verifier-wrong",
    "unit-ignored": "verifier-wrong",
    "template-drift": "template-drift",
    "thoughts-kept": "template-drift",
    "clock-jumps": "clock",
    "death": "process-died",
    "learner-starves": "learner-starved",
}
REFUSED = {"data-of-another", "data-changed", "gold-missing", "key-twice", "prompts-too-long"}
UNSEEN = {"reward-of-another", "group-of-different-prompts"}
TABLE = Path(__file__).parents[2] / "docs" / "silent-faults.md"


@pytest.fixture(scope="module")
def first(model_folder: Path) -> Lab:
    """A run of two steps that is to be resumed."""
    lab = Lab(model_folder, steps=2)
    lab.train()
    return lab


def test_optimizer_lost(first: Lab) -> None:
    lab = first.continued(optimizer=False)
    assert lab.train() == ["optimizer-steps"] and lab.step == 2


def test_data_repeated(first: Lab) -> None:
    journal = first.core.snapshot()
    lab = first.continued(journal=journal | {"tasks": journal["tasks"] | {"source": 0}})
    assert lab.raised == [(2, "data-repeated")]


def test_data_of_another(first: Lab) -> None:
    """The cursor of the old data would begin the new ones in the middle, and its open tasks would be other ones."""
    core = BrokerCore(first.core.rules.changed(steps=9), data={"dataset": "40 tasks of b.jsonl, digest 0b"})
    journal = first.core.snapshot() | {"data": {"dataset": "40 tasks of a.jsonl, digest 0a"}}
    with pytest.raises(ValueError, match=r"dataset was trained on .* 0a, and has .* 0b; .* resume_data=new"):
        core.restore(journal)


HALVES = [f"\\frac{{{n}}}{{2}}" for n in range(-15, 15, 2)]
FAULTY: dict[str, tuple[Verifier, list[str], str]] = {
    "verifier-by-rounding": (VERIFIERS["rounds to six digits"], HALVES, "accepted"),
    "verifier-too-strict": (VERIFIERS["another spelling is refused"], HALVES, "refused"),
    "order-ignored": (
        reading(lambda text: "".join(sorted(members(text)))),
        [f"({n}, {n + 3})" for n in range(15)],
        "accepted",
    ),
    "unit-ignored": (without(r"\\text.*"), [f"{n}\\text{{ cm}}" for n in range(2, 17)], "accepted"),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_verifier_at_fault(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """It pays for wrong answers, or refuses right ones, where answers have what it is blind to."""
    verifier, golds, verdict = FAULTY[name]
    monkeypatch.setattr("tests.envs.test_audit.ROWS", [(gold, gold) for gold in golds])
    told, auditor = audited(verifier, steps=3)
    assert told and told[0].startswith("verifier-wrong: ") and told[0].endswith(f"was {verdict}")
    assert (auditor.tally.accepted > 0, auditor.tally.refused > 0) == (verdict == "accepted", verdict == "refused")


def test_dropout_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader knows `nn.Dropout` and that of attention; a family has a `residual_dropout` as well."""
    monkeypatch.setattr("rl.models.loading._without_dropout", lambda owner: setattr(owner, "attention_dropout", 0.0))
    lab = Lab(save_family("seed_oss", tmp_path, dropout=0.1, vocab_size=VOCAB))
    assert lab.train() == ["weights-differ"] and lab.step == 0


def test_dead_expert(tmp_path: Path) -> None:
    """All rows of a router become alike, so that the same experts have every token."""
    lab = Lab(save_family("qwen3_moe", tmp_path, vocab_size=VOCAB), "alarms.limits.dead-expert.tokens=15")
    router = lab.trainer.policy.model.model.layers[1].mlp.gate
    step = lab.trainer.optimizer.step

    def collapsed(*arguments: Any) -> tuple[float, float]:
        done = step(*arguments)
        with torch.no_grad():
            router.weight.copy_(router.weight[:1].clone())
        return done

    vars(lab.trainer.optimizer)["step"] = collapsed
    lab.train(until="dead-expert")
    assert lab.raised[-1] == (1, "dead-expert")


def test_data_changed(tmp_path: Path, make_run: MakeRun) -> None:
    """A server that is started again, or on another machine, would ask other questions under the same numbers."""
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "1+1?", "answer": "2"}\n' * 3)
    options = ("env.name=dataset", "env.options.reward=exact", "env.options.eval_count=1", "env.max_turns=1")
    run = make_run(*options, f"env.options.source={source}")
    family = make_family(run.config)
    began = data_of("dataset", family)
    check_data(began, "dataset", family)

    source.write_text('{"prompt": "1+2?", "answer": "3"}\n' + source.read_text())
    process = cast(Process, SimpleNamespace(config=run.config, run=run.model_copy(update={"data": began})))
    with pytest.raises(OtherData, match=r"began with 2 tasks of .*, and this server finds 3 .*resume_data=new"):
        asyncio.run(serve(process))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"prompt": "1+1?", "answer": null}', "row 2, field 'answer': None is no answer"),
        ('{"prompt": "1+1?", "answer": "3", "answer": "2"}', "the field 'answer' stands in it twice"),
        (f'{{"prompt": "{"9" * 200}", "answer": "2"}}', "1 of 2 training prompts .* do not fit"),
    ],
    ids=["gold-missing", "key-twice", "prompts-too-long"],
)
def test_rows_that_a_run_would_suffer_in_silence(tmp_path: Path, row: str, said: str) -> None:
    sound = '{"prompt": "1+1?", "answer": "2"}\n'
    (tmp_path / "rows.jsonl").write_text(f"{sound}{row}\n{sound}")
    options = ("env.name=dataset", "env.options.reward=exact", "env.options.eval_count=1", "sampling.max_tokens=20")
    source = f"env.options.source={tmp_path / 'rows.jsonl'}"
    config = load_config(None, [*options, source, "generator.max_model_len=100"])
    with pytest.raises(ConfigError, match=said):
        check_lengths(config, make_family(config), make_model_folder(tmp_path / "model"))


class Tasks:
    """Numbers from 0 on in training, and held out from `eval_from` on; `kinds`: as many are different."""

    def __init__(self, eval_from: int, kinds: int = 100_000) -> None:
        self.eval_from = eval_from
        self.kinds = kinds

    def task_count(self, split: str) -> int:
        return 19_000

    def task(self, split: str, index: int) -> dict[str, int]:
        return {"question": (index + self.eval_from * (split == "eval")) % self.kinds}


def test_eval_on_train(capsys: pytest.CaptureFixture[str]) -> None:
    """It is said before anything starts; a game of ten positions cannot but be evaluated on what is trained."""
    config = load_config(None, ["eval.tasks=100"])
    with pytest.raises(ConfigError, match="alarm eval-on-train: 100% of 100 held-out tasks are training tasks"):
        check_held_out(config, Tasks(eval_from=0))
    check_held_out(config, Tasks(eval_from=20_000))
    assert capsys.readouterr().err == ""
    check_held_out(config, Tasks(eval_from=20_000, kinds=10))
    assert capsys.readouterr().err.startswith("! 100% of 100 held-out tasks are training tasks; the game has few tasks")


def raised_by_template(tokenizer: ChatTokenizer) -> list[str]:
    raised: list[str] = []
    check_template(tokenizer, "template", Alarms(AlarmsConfig(), lambda name, _: raised.append(name)))
    return raised


def test_template_drift(tmp_path: Path) -> None:
    """A template that writes past turns in another form than the last one."""
    drifting = TEMPLATE.replace(
        "{%- elif '</think>' in content %}", "{%- else %}{%- set content = '(past) ' + content %}"
    )
    plain = ChatTokenizer(make_model_folder(tmp_path / "plain"))
    spoilt = ChatTokenizer(make_model_folder(tmp_path / "drifting", template=drifting))
    assert raised_by_template(plain) == []
    assert raised_by_template(spoilt) == ["template-drift"]


def test_thoughts_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`chat.thinking=template` is ignored: a history goes on with thoughts that the template drops."""
    tokenizer = ChatTokenizer(make_model_folder(tmp_path))
    monkeypatch.setattr("rollout.episodes.conversation.keeps_thoughts", lambda *_: True)
    assert raised_by_template(tokenizer) == ["template-drift"]


def test_clock_jumps(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(*QUIET)
    run: RunFile = made.model_copy(update={"socket_folder": made.folder / "ipc"})
    run.socket_folder.mkdir()
    run.save()
    started = run.folder / "logs" / "learner.0.0.log"  # the supervisor has looked at its clock by then
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + 3600 * started.exists())
    code, summary = execute(run, broker="done", learner="done")
    assert code == 0 and "a jump of 3600 s" in cast(dict[str, str], summary["alarms"])["clock"]


def test_death(make_run: MakeRun) -> None:
    made = make_run(*QUIET)
    run: RunFile = made.model_copy(update={"socket_folder": made.folder / "ipc"})
    run.socket_folder.mkdir()
    run.save()
    code, summary = execute(run, generator="die", broker="done1", learner="done1")
    told = "generator.0 killed by SIGKILL; it is started again"
    assert code == 0 and summary["alarms"] == {"process-died": f"after step 0, supervisor: {told}"}

    (kept,) = read_alarms(run.folder)
    assert (kept.name, kept.who, kept.step, kept.detail) == ("process-died", "supervisor", 0, told)
    assert kept.change == ALARMS["process-died"].change


def test_learner_starves(tmp_path: Path) -> None:
    """The environment takes nearly all of every step."""
    slow = ("rollout.alpha=0", "env.options.mean_s=0.2", "learner.options.step_s=0", "steps=6", "eval.tasks=0")
    summary = finish(start(tmp_path, *slow, "alarms.limits.learner-starved={s: 0.1, share: 0.5}"), tmp_path)
    assert summary["alarms"].keys() == {"learner-starved"}
    (kept,) = read_alarms(tmp_path / "simulated")
    assert kept.step >= 2, "three such steps in a row"
    assert summary["alarms"]["learner-starved"] == f"{kept.when}, learner.0: {kept.detail}"


@pytest.mark.parametrize(
    "kind, device, named", [("fsdp", "cuda", True), ("fsdp", "cpu", False), ("simulated", "cpu", True)]
)
def test_a_learner_that_waits_on_shared_cpus_does_not_starve(kind: str, device: str, named: bool) -> None:
    raised: list[str] = []
    alarms = Alarms(AlarmsConfig(), lambda name, _: raised.append(name))
    client = object.__new__(RunClient)
    client.config = load_config(None, [f"learner.kind={kind}"])
    client.process = cast(Any, SimpleNamespace(alarms=alarms))
    client.run = cast(Any, SimpleNamespace(learner_device=device))
    client._waited_s = 9.5

    for step in range(3):
        client._check_starved(step, 10.0)
    assert raised == ["learner-starved"] * named


def test_an_alarm_is_shown_once_and_counted_each_time(tmp_path: Path) -> None:
    """Every answer is cut, so all steps from the third on raise it."""
    running = start(tmp_path, "sampling.max_tokens=1", "steps=8", "eval.tasks=0")
    output, _ = running.communicate(timeout=240)
    assert running.returncode == 0 and output.count("alarm answers-cut") == 1, output

    kept = {alarm.name: alarm for alarm in read_alarms(tmp_path / "simulated")}["answers-cut"]
    assert kept.count == 6 and kept.step < kept.last_step <= 8
    summary = json.loads((tmp_path / "simulated" / "summary.json").read_text())
    told = f"after step {kept.step}, 6 times up to step {kept.last_step}, broker.0: {kept.detail}"
    assert summary["alarms"]["answers-cut"] == told


def test_what_was_kept_of_an_alarm_outlives_a_broken_line(tmp_path: Path) -> None:
    alarm = RaisedAlarm.of("clock", 3, "supervisor", "a jump")
    keep_alarm(tmp_path, alarm)
    for each in (alarm.again(5), RaisedAlarm.of("entropy", 5, "learner.0", ""), alarm.again(9)):
        keep_alarm(tmp_path, each)
    with (tmp_path / "alarms.jsonl").open("ab") as file:
        file.write(b'{"type":"again","na')  # it was being written

    clock, entropy = read_alarms(tmp_path)
    assert (clock.step, clock.last_step, clock.count) == (3, 9, 3) and clock == alarm
    assert (entropy.step, entropy.last_step, entropy.count) == (5, 5, 1)


def test_reward_of_another_is_seen_by_nobody(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each episode is consistent in itself: only a second judge could tell. If not, change the table."""
    lab = Lab(model_folder, steps=3)
    last: list[float] = [0.0]

    def another(self: Any, ids: list[int]) -> float:
        last.append(sum(each % 2 == 0 for each in ids) / len(ids))
        return last[-2]

    monkeypatch.setattr(Game, "judge", another)
    assert lab.train() == []


def test_a_group_of_different_prompts_is_seen_by_nobody(model_folder: Path) -> None:
    """A reset that draws anew for each member: what it should be asked is known to the environment alone."""
    made = iter(range(1_000_000))

    class Drawn(Game):
        async def reset(self, task: int) -> list[ChatMessage]:
            return await super().reset(task + next(made) % 2)

    lab = Lab(model_folder, steps=2)
    lab.environment = Drawn
    assert lab.train() == []


# ---------------------------------------------------------------- the table


def rows() -> dict[str, str]:
    """The guard's column of each fault."""
    found = {}
    for text in TABLE.read_text().splitlines():
        if text.startswith("| `"):
            cells = [cell.strip() for cell in text.strip("|").split("|")]
            found[cells[0].strip("`")] = cells[-1]
    return found


def test_the_table_says_what_the_museum_shows() -> None:
    expected = {name: fault.alarm for name, fault in FAULTS.items()} | ELSEWHERE
    found = rows()
    assert found.keys() == expected.keys() | REFUSED | UNSEEN
    assert ALARMS.keys() == set(expected.values()), "an alarm that nothing has ever raised"
    assert len(found) >= 40 and len(UNSEEN) <= 0.05 * len(found)
    for name, alarm in expected.items():
        assert alarm in ALARMS and f"`{alarm}`" in found[name], name
    assert all(found[name].startswith("none") for name in UNSEEN)
    assert all(found[name].startswith("refused") for name in REFUSED)

"""Faults that show before the first batch, at a resume, or outside of every process; and those that nothing finds."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from envs.guards import check_template
from envs.held_out import check_held_out
from rl.config.alarms import AlarmsConfig
from rl.config.schema import ConfigError, load_config
from rl.learner.run_client import RunClient
from rl.observe.alarms import ALARMS, Alarms, RaisedAlarm, keep_alarm, read_alarms
from rl.wire.run import RunFile
from rollout.broker import BrokerCore
from rollout.episodes.tokenizer import ChatTokenizer
from tests.conftest import MakeRun
from tests.envs.model_folder import TEMPLATE, make_model_folder
from tests.envs.test_audit import FAULTS as VERIFIERS
from tests.envs.test_audit import audited
from tests.launch.test_supervisor import QUIET, execute
from tests.museum import slow_faults as slow_faults
from tests.museum.faults import FAULTS
from tests.museum.lab import Game, Lab
from tests.test_end_to_end_simulated import finish, start

ELSEWHERE = {
    "optimizer-lost": "optimizer-steps",
    "data-repeated": "data-repeated",
    "eval-on-train": "eval-on-train",
    "verifier-by-rounding": "verifier-wrong",
    "template-drift": "template-drift",
    "clock-jumps": "clock",
    "death": "process-died",
    "learner-starves": "learner-starved",
}
REFUSED = {"data-of-another"}
ROUNDING = VERIFIERS["rounds to six digits"]
UNSEEN = {"reward-of-another"}
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


def test_verifier_by_rounding() -> None:
    """Six digits of a number are compared, so that a model is paid for answers that are nearly right."""
    told, auditor = audited(ROUNDING, steps=3)
    assert told and told[0].startswith("verifier-wrong: ") and "next to it" in told[0]
    assert auditor.news()["audit/false_accept"] > 0


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


def test_template_drift(tmp_path: Path) -> None:
    """A template that writes past turns in another form than the last one."""
    drifting = TEMPLATE.replace(
        "{%- elif '</think>' in content %}", "{%- else %}{%- set content = '(past) ' + content %}"
    )
    raised: list[str] = []
    alarms = Alarms(AlarmsConfig(), lambda name, _: raised.append(name))
    check_template(ChatTokenizer(make_model_folder(tmp_path / "plain")), "template", alarms)
    assert raised == []
    check_template(ChatTokenizer(make_model_folder(tmp_path / "drifting", template=drifting)), "template", alarms)
    assert raised == ["template-drift"]


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

"""A run goes on where it stopped, to the same last step, with one history: real processes, simulated roles."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from launch.cli import main
from launch.report.gather import gather
from launch.sittings import history_of, with_checkpoint, write_history
from launch.summary import Observed
from rl.config.schema import Config, ConfigError, load_config
from rl.store.checkpoint_folder import Meta, begin, commit
from rollout.broker.core import BrokerCore
from rollout.broker.group_state import Duration
from rollout.broker.rules import Rules
from tests.launch.simulated_run import ROOT

STEPS = 12
EVERY = ["learner.checkpoint_every=3", "eval.every=4", f"steps={STEPS}", "timeouts.stop_s=60"]


def command(runs: Path, *overrides: str) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "launch.cli", "run", "simulated", f"runs={runs}", *EVERY, *overrides]
    return subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stop_at(step: int, process: subprocess.Popen[str], run: Path, with_signal: signal.Signals) -> str:
    until = time.monotonic() + 120
    while not any(row["step"] >= step for row in rows_of(run)):
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.02)
    process.send_signal(with_signal)
    output, _ = process.communicate(timeout=240)
    return output


@pytest.mark.docs
def test_the_same_command_goes_on_to_the_same_end_with_one_history(tmp_path: Path) -> None:
    """Stopped by Ctrl-C, then killed behind its newest checkpoint, then to its end."""
    run = tmp_path / "simulated"
    slow = "learner.options.step_s=0.2"
    output = stop_at(2, command(tmp_path, slow), run, signal.SIGINT)
    (line,) = [line for line in output.splitlines() if line.startswith("to go on from step ")]
    assert line.endswith(": the same command, or resume=auto") and len(line) <= 80
    stopped = int(line.removeprefix("to go on from step ").partition(":")[0])
    assert 2 <= stopped < 5

    stop_at(stopped + 4, command(tmp_path, slow), run, signal.SIGKILL)
    process = command(tmp_path, slow)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output[-2000:]
    assert "where the run of this name stopped; resume=new begins anew" in output

    rows = rows_of(run)
    trained = [row["step"] for row in rows if "train/loss" in row]
    evaluated = [row["step"] for row in rows if "eval/accuracy" in row]
    elapsed = [row["time/elapsed"] for row in rows if "train/loss" in row]
    assert trained == [*range(1, STEPS + 1)] and elapsed == sorted(elapsed)
    assert len(evaluated) == len(set(evaluated)) and {0, 4, 8, 12} <= {*evaluated}

    summary = json.loads((run / "summary.json").read_text())
    assert summary["start_step"] + summary["steps"] == STEPS
    first = next(row["eval/accuracy"] for row in rows if "eval/accuracy" in row)
    assert summary["eval"]["first"] == first
    facts = gather(run).facts
    assert facts["state"] == "finished" and facts["startStep"] == 0
    assert len([*tmp_path.glob("simulated.*")]) == 2


# ------------------------------------------------------------ what `resume` means


def stopped_run(runs: Path, step: int, *overrides: str, over: float = 0.0) -> tuple[Config, Path]:
    """A run that has a checkpoint of this step, and nothing else."""
    config = load_config("simulated", [f"runs={runs}", *overrides])
    folder = runs / config.name
    checkpoint = saved(folder, step, config)
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    row = {"step": step, "train/loss": 1.0, "time/over": over, "time/elapsed": 9.0}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    return config, checkpoint


def saved(folder: Path, step: int, config: Config) -> Path:
    core = BrokerCore(Rules.of(config, 1000))
    core.groups.advance_to(step, step)
    begin(folder / "checkpoints", step)
    journal = msgspec.msgpack.encode(core.snapshot())
    return commit(folder / "checkpoints", Meta(step=step, timeline=0, ranks=2), journal, keep=9)


def test_by_itself_only_what_stopped_and_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, checkpoint = stopped_run(tmp_path, 3)

    def found(*overrides: str) -> Path | None:
        return with_checkpoint(load_config("simulated", [f"runs={tmp_path}", *overrides])).resume

    assert found() == checkpoint
    assert found("resume=new") is None and found("steps=0") is None and found("name=other") is None
    capsys.readouterr()
    assert found("seed=5") is None
    told = "a run of this name stopped at step 3, with other seed; resume=auto goes on from there"
    assert told in capsys.readouterr().out
    assert found("seed=5", "resume=auto") == found(f"resume={tmp_path / 'simulated'}") == checkpoint
    assert found("resume=auto", "name=other") is None

    # A sitting that died before a checkpoint of its own began with that of another, which was moved.
    (tmp_path / "simulated").rename(tmp_path / "simulated.1")
    moved = tmp_path / "simulated.1" / "checkpoints" / "step-3"
    (tmp_path / "simulated").mkdir()
    later = config.model_copy(update={"resume": moved}).model_dump(mode="json")
    (tmp_path / "simulated" / "config.yaml").write_text(json.dumps(later))
    assert found() == found("resume=auto") == moved


@pytest.mark.parametrize(("step", "over"), [(20, 0.0), (3, 1.0)], ids=["by steps", "by time"])
def test_what_has_ended_begins_anew(step: int, over: float, tmp_path: Path) -> None:
    config, _ = stopped_run(tmp_path, step, over=over)
    assert with_checkpoint(config).resume is None


def test_steps_that_are_trained_already_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, checkpoint = stopped_run(tmp_path, 20)
    again = ["run", "simulated", f"runs={tmp_path}", f"resume={checkpoint}", "--dry-run"]
    assert main(again) == 2
    told = f"steps=20: resume='{checkpoint}' has trained 20 already, and steps counts all; set it above"
    assert told in capsys.readouterr().err
    assert main([*again, "steps=21"]) == main([*again, "steps=0"]) == 0


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ConfigError, match="a run without a complete checkpoint; leave it out"):
        with_checkpoint(load_config("simulated", [f"runs={tmp_path}", f"resume={tmp_path / 'empty'}"]))


# ------------------------------------------------------------ one history


def test_history_ends_at_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-2"
    rows = [{"step": 0, "eval/accuracy": 0.1}]
    rows += [{"step": step, "train/loss": 1.0} for step in (1, 2)]
    rows += [{"step": 2, "eval/accuracy": 0.2}, {"step": 3, "train/loss": 9.0}]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 4, "tra']))

    assert [*history_of(checkpoint, 2, evaluates=True)] == rows[:3], "its version is evaluated anew"
    assert [*history_of(checkpoint, 2, evaluates=False)] == rows[:4]


def test_an_evaluation_of_a_checkpoint_has_no_history(tmp_path: Path) -> None:
    config, checkpoint = stopped_run(tmp_path, 3)
    for steps, there in (0, False), (9, True):
        folder = tmp_path / f"of {steps}"
        folder.mkdir()
        write_history(folder, config.model_copy(update={"resume": checkpoint, "steps": steps}), 3)
        assert (folder / "metrics.jsonl").exists() == there


def test_seconds_go_on() -> None:
    """The share of the time, by which schedules come down, does not begin anew, and is kept by the journal."""
    duration = Duration(steps=100, seconds=10.0)
    duration.begin(0, now=5.0)
    assert duration.assembled(1, now=9.0) == pytest.approx(0.4)
    later = Duration(steps=100, seconds=10.0)
    later.go_on(duration.spent_s)
    later.begin(1, now=100.0)
    assert later.assembled(2, now=101.0) == pytest.approx(0.5)

    rules = Rules.of(load_config("simulated"), 1000)
    core, restored = BrokerCore(rules), BrokerCore(rules)
    core.groups.run.go_on(7.0)
    restored.restore(core.snapshot())
    assert restored.groups.run.spent_s == 7.0


def test_the_time_that_is_shown_goes_on() -> None:
    observed = Observed(time.time(), 3)
    observed.go_on([{"step": 0, "eval/accuracy": 0.25}, {"step": 3, "train/loss": 1.0, "time/elapsed": 50.0}])
    assert observed.step_values({})["time/elapsed"] == pytest.approx(50, abs=5)
    assert observed.evals == [(0, 0.25)]


def test_what_was_set_in_a_sitting_is_told_to_who_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends with its run: the recipe says what the next one has."""
    folder = tmp_path / "run"
    begin(folder / "checkpoints", 4)
    checkpoint = commit(folder / "checkpoints", Meta(4, 0, 1), b"", keep=9)
    (folder / "changes.jsonl").write_text(
        '{"step": 2, "timeline": 0, "sets": {"learner.lr": 0.5, "learner.warmup_steps": 7}}\n'
        '{"step": 6, "timeline": 0, "sets": {"learner.lr": 0.9}}\n'
    )
    with_checkpoint(load_config(None, [f"resume={checkpoint}", "learner.warmup_steps=7"]))
    (line,) = capsys.readouterr().out.splitlines()
    assert line == "! what fresco set had set ended with that run; to keep it, give learner.lr=0.5"
    with_checkpoint(load_config(None, [f"resume={checkpoint}", "learner.warmup_steps=7", "learner.lr=0.5"]))
    assert capsys.readouterr().out == ""

"""`placement=alternate` in whole runs: no token while the learner steps; who dies in whosever turn is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections import defaultdict
from pathlib import Path

import pytest

from launch.cli import main
from rl.observe.trace import read_trace
from rl.observe.trace_events import EngineState, FirstToken, SpanBegan, SpanEnded
from rl.weights.turns import Turns
from rl.wire.run import RunFile
from tests.test_end_to_end_real import nothing_is_left, system
from tests.test_end_to_end_simulated import (
    SAMPLE_STATES,
    TOKEN_STATES,
    check_books,
    finish,
    metrics_rows,
    pid_of,
    restarts,
    start,
    wait_for_step,
)

SETTINGS = ("placement=alternate", "learner.ranks=1", "tracking.trace=full", "timeouts.heartbeat_s=0.05")


def sampled_in_turns_of_the_learner(folder: Path) -> tuple[int, int]:
    """First tokens of answers outside the spans of training; and inside, with the tokens that an engine counted between
    two looks there."""
    spans: list[tuple[float, float]] = []
    began: dict[object, float] = {}
    counts: defaultdict[object, list[tuple[float, int]]] = defaultdict(list)
    firsts: list[float] = []
    for record in read_trace(folder):
        match record.event:
            case SpanBegan("train"):
                began[record.source] = record.time
            case SpanEnded("train"):
                spans.append((began.pop(record.source), record.time))
            case FirstToken():
                firsts.append(record.time)
            case EngineState():
                counts[record.source].append((record.time, record.event.tokens))

    within = tokens = 0
    for begin, end in spans:
        within += sum(begin < at < end for at in firsts)
        for states in counts.values():
            inside = [count for at, count in states if begin < at < end]
            tokens += inside[-1] - inside[0] if inside else 0
    return len(firsts) - within, within + tokens


def in_learners_turn(tmp_path: Path, deadline_s: float = 240) -> None:
    """Until the learner has the device, so that engines rest. The look itself is as short as that of an engine."""
    deadline = time.monotonic() + deadline_s
    engine = Turns(RunFile.load(tmp_path / "simulated"), alone=False)
    while engine.take():
        engine.give()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    engine.close()


@pytest.mark.parametrize("alpha", [0, 2])
def test_turns_of_simulated_engines(tmp_path: Path, alpha: int) -> None:
    settings = (f"rollout.alpha={alpha}", "learner.options.step_s=0.3", "steps=8", "eval.every=4")
    process = start(tmp_path, *SETTINGS, *settings, "generator.options.decode_base_s=0.005")
    check_books(finish(process, tmp_path), steps=8)
    elsewhere, tokens = sampled_in_turns_of_the_learner(tmp_path / "simulated")
    assert elsewhere >= 8 and tokens == 0
    assert restarts(tmp_path) == {}
    rows = [row["step"] for row in metrics_rows(tmp_path) if "eval/accuracy" in row]
    assert rows == [0, 4, 8], "engines answered the last evaluation as well"


def test_without_turns_they_overlap(tmp_path: Path) -> None:
    """The test before can fail."""
    settings = ("learner.options.step_s=0.3", "steps=8", "generator.options.decode_base_s=0.005", "placement=shared")
    finish(start(tmp_path, *SETTINGS, *settings, "rollout.alpha=2"), tmp_path)
    elsewhere, tokens = sampled_in_turns_of_the_learner(tmp_path / "simulated")
    assert elsewhere and tokens


def test_deaths_in_the_learners_turn(tmp_path: Path) -> None:
    """A generator while it rests, then the learner while it steps, then an engine again."""
    settings = ("steps=20", "learner.options.step_s=0.4", "learner.checkpoint_every=6", "eval.every=5")
    process = start(tmp_path, *SETTINGS, *settings)
    for step, role, index, incarnation in [
        (3, "rollout.generator.process", 0, 0),
        (9, "rl.learner.simulated", 0, 0),
        (12, "rollout.generator.process", 1, 0),
    ]:
        wait_for_step(tmp_path, step)
        victim = pid_of(tmp_path, role, index, incarnation)
        in_learners_turn(tmp_path)
        os.kill(victim, signal.SIGKILL)

    check_books(finish(process, tmp_path), steps=20)
    assert restarts(tmp_path) == {"generator": 2, "learner": 1}
    assert sampled_in_turns_of_the_learner(tmp_path / "simulated")[1] == 0
    versions = [json.loads(line) for line in (tmp_path / "simulated" / "versions.jsonl").read_text().splitlines()]
    assert [(line["timeline"], line["n"]) for line in versions] == [(0, n) for n in range(21)]


def test_an_undo_and_an_end_by_time(tmp_path: Path) -> None:
    settings = ("steps=100000", "seconds=8", "learner.checkpoint_every=4", "learner.options.step_s=0.1")
    process = start(tmp_path, *SETTINGS, *settings)
    wait_for_step(tmp_path, 6)
    assert main(["undo", str(tmp_path / "simulated"), "--to", "4"]) == 0
    summary = finish(process, tmp_path)
    assert summary["ledger"]["samples"]["stale"] > 0 and summary["eval"].keys() == {"first", "last"}
    assert restarts(tmp_path) == {}
    assert sampled_in_turns_of_the_learner(tmp_path / "simulated")[1] == 0


# ---------------------------------------------------------------- vLLM and FSDP


def check_real(process: subprocess.Popen[str], tmp_path: Path, steps: int) -> None:
    output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output[-5000:]
    nothing_is_left(tmp_path)
    summary = json.loads((tmp_path / "simulated" / "summary.json").read_text())
    samples, tokens = (summary["ledger"][kind] for kind in ("samples", "tokens"))
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES) and samples["trained"] == steps * 6
    assert tokens["generated"] == sum(tokens[state] for state in TOKEN_STATES)
    assert summary["freshness_violations"] == 0 and summary["eval"].keys() == {"first", "last"}
    elsewhere, sampled = sampled_in_turns_of_the_learner(tmp_path / "simulated")
    assert elsewhere and sampled == 0
    trained = [row for row in metrics_rows(tmp_path) if "train/loss" in row]
    assert [row["step"] for row in trained] == list(range(1, steps + 1))
    assert all(row["time/take_device"] > 0 and row["time/give_device"] > 0 for row in trained)


@pytest.mark.docs
@pytest.mark.parametrize("ranks", [1, 2])
def test_turns_of_a_real_engine(tmp_path: Path, ranks: int) -> None:
    with system(tmp_path, *SETTINGS, f"learner.ranks={ranks}", "steps=3", "alarms.exact=1e-3") as process:
        check_real(process, tmp_path, 3)
    assert restarts(tmp_path) == {}


@pytest.mark.docs
def test_deaths_of_real_processes_in_the_learners_turn(tmp_path: Path) -> None:
    with system(tmp_path, *SETTINGS, "steps=6", "learner.checkpoint_every=2", "tracking.replay=off") as process:
        for step, role in [(1, "rollout.generator.process"), (3, "rl.learner.process")]:
            wait_for_step(tmp_path, step)
            victim = pid_of(tmp_path, role)
            in_learners_turn(tmp_path)
            os.kill(victim, signal.SIGKILL)
        check_real(process, tmp_path, 6)
    assert restarts(tmp_path) == {"generator": 1, "learner": 1}

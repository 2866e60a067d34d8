"""The learner dies and comes back in place: all else goes on, and the result is that of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rl.config.damage import read_lines
from tests.test_end_to_end_simulated import check_books, finish, pid_of, restarts, start

LEARNER = "rl.learner.simulated"
STEPS = 24
SETTINGS = (
    f"steps={STEPS}",
    "learner.ranks=2",
    "learner.checkpoint_every=8",
    "learner.options.step_s=0.15",  # it is not over before whoever watches has killed it
    "eval.tasks=8",
    "eval.every=6",
    "learner.batch_deadline_s=120",  # who waits for whom is said before the test's own deadline
    "weights.deadline_s=120",
)


def versions(tmp_path: Path) -> list[dict[str, Any]]:
    return list(read_lines(tmp_path / "simulated" / "versions.jsonl", dict[str, Any]))


def wait_for_version(process: subprocess.Popen[str], tmp_path: Path, n: int, deadline_s: float = 240) -> None:
    deadline = time.monotonic() + deadline_s
    while time.monotonic() < deadline and process.poll() is None:
        if any(line["n"] >= n for line in versions(tmp_path)):
            return
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    raise AssertionError(f"version {n} was not published\n{process.communicate(timeout=240)[0][-3000:]}")


def kill_learner(tmp_path: Path, incarnation: int = 0) -> None:
    os.kill(pid_of(tmp_path, LEARNER, 0, incarnation), signal.SIGKILL)


GLOO = "rl.weights.device.nccl:NCCL"  # channel nccl, whose name is refused on a CPU, as is that of ipc
IPC = "rl.weights.device.ipc:IPC"


def check_rows(tmp_path: Path) -> None:
    """Every step has one row, whatever was trained twice."""
    rows = [json.loads(line) for line in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, STEPS + 1))
    assert sorted({row["step"] for row in rows if "eval/accuracy" in row}) == [0, 6, 12, 18, 24]


@pytest.mark.parametrize(
    "transport",
    [
        pytest.param("shm", id="shm"),
        pytest.param("zmq", id="zmq", marks=pytest.mark.docs),
        pytest.param("zmq network.transport=tcp", id="tcp", marks=pytest.mark.docs),
        pytest.param(GLOO, id="nccl", marks=pytest.mark.docs),
        pytest.param(IPC, id="ipc", marks=pytest.mark.docs),
    ],
)
@pytest.mark.parametrize(("rank", "at"), [pytest.param(0, 3, marks=pytest.mark.docs), (1, 13)])
def test_a_killed_rank_costs_nothing_but_time(tmp_path: Path, transport: str, rank: int, at: int) -> None:
    """Before the first checkpoint, and after one; versions come out as before, so the timeline stays."""
    process = start(tmp_path, *SETTINGS, *f"weights.transport={transport}".split())
    wait_for_version(process, tmp_path, 0)
    learner = pid_of(tmp_path, LEARNER, rank, 0)  # looking for it takes longer than a step
    wait_for_version(process, tmp_path, at)
    os.kill(learner, signal.SIGKILL)

    summary = finish(process, tmp_path)
    assert restarts(tmp_path).keys() == {"learner"}
    check_books(summary, STEPS)
    check_rows(tmp_path)
    assert [(line["timeline"], line["n"]) for line in versions(tmp_path)] == [(0, n) for n in range(STEPS + 1)]


@pytest.mark.docs
def test_two_deaths_within_one_checkpoint_interval(tmp_path: Path) -> None:
    process = start(tmp_path, *SETTINGS)
    wait_for_version(process, tmp_path, 11)
    kill_learner(tmp_path)
    kill_learner(tmp_path, incarnation=1)  # while it starts
    check_books(finish(process, tmp_path), STEPS)
    check_rows(tmp_path)


DIES_IN_A_CHECKPOINT = """
import os, pathlib, signal, sys

def seen(event, arguments):
    for number, place in enumerate({places!r}):
        died = pathlib.Path({told!r}, f"died-{{number}}")
        if arguments and [event, *str(arguments[0]).split("/")[-2:]] == place and not died.exists():
            died.mkdir()
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(seen)
"""


def test_deaths_within_a_checkpoint_go_on_from_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first one, before its last file; in the second one, before it has its name."""
    places = [["open", "step-8.tmp", "digests.json"], ["os.rename", "checkpoints", "step-16.tmp"]]
    (tmp_path / "sitecustomize.py").write_text(DIES_IN_A_CHECKPOINT.format(places=places, told=str(tmp_path)))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")

    process = start(tmp_path, *SETTINGS, "learner.ranks=1")
    summary = finish(process, tmp_path)
    assert all((tmp_path / f"died-{number}").exists() for number in range(len(places)))
    check_books(summary, STEPS)
    check_rows(tmp_path)
    assert [(line["timeline"], line["n"]) for line in versions(tmp_path)] == [(0, n) for n in range(STEPS + 1)]


def test_a_version_that_comes_out_otherwise_begins_an_timeline(tmp_path: Path) -> None:
    """Version 11's bytes were others, says the file: what came of it and of later ones is taken back."""
    process = start(tmp_path, *SETTINGS)
    wait_for_version(process, tmp_path, 0)
    learner = pid_of(tmp_path, LEARNER, 0, 0)  # looking for it takes longer than a step
    wait_for_version(process, tmp_path, 13)
    path = tmp_path / "simulated" / "versions.jsonl"
    os.kill(learner, signal.SIGSTOP)  # it appends nothing, and has no successor yet
    changed = [line | {"checksum": 1} if line["n"] == 11 else line for line in versions(tmp_path)]
    path.write_text("".join(json.dumps(line) + "\n" for line in changed))
    os.kill(learner, signal.SIGKILL)

    summary = finish(process, tmp_path)
    check_books(summary, STEPS)
    assert summary["ledger"]["samples"]["stale"] >= 32, "the batches of steps 11 and 12"
    published = [(line["timeline"], line["n"]) for line in versions(tmp_path)]
    newest = max(n for timeline, n in published if timeline == 0)
    assert published == [(0, n) for n in range(newest + 1)] + [(1, n) for n in range(11, STEPS + 1)]

"""A file of a running run's folder is damaged, and then whoever reads it again is killed: one line with its name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout.broker import write_ahead
from tests.test_end_to_end_simulated import finish, pid_of, start, wait_for_step

BROKER, GENERATOR, LEARNER = "rollout.broker.process", "rollout.generator.process", "rl.learner.simulated"


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        *(("run.json", GENERATOR), ("curve.key", GENERATOR), ("broker.log", BROKER), ("versions.jsonl", LEARNER)),
        *(("batches/*.msgpack", LEARNER), ("evals.jsonl", BROKER)),
    ],
)
def test_a_damaged_file_is_one_line_with_its_name(tmp_path: Path, name: str, reader: str) -> None:
    process = start(tmp_path, "steps=100000", "learner.options.step_s=0.1", "weights.transport=zmq")
    wait_for_step(tmp_path, 3)
    victim = pid_of(tmp_path, reader)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "simulated").glob(name)):
        assert time.monotonic() < deadline, f"it has written no {name}"
        time.sleep(0.01)

    os.kill(victim, signal.SIGSTOP)  # and so everyone: nothing of it is written anew
    files = list((tmp_path / "simulated").glob(name))
    whole = {path: path.read_bytes() for path in files}
    for path, content in whole.items():
        middle = len(content) // 2
        path.write_bytes(content[: middle // 2] + b"\xff" * middle + content[middle // 2 + middle :])
    ends_in_one_line(process, tmp_path, victim, whole)


def test_a_log_that_lost_its_last_records_is_one_line_with_its_name(tmp_path: Path) -> None:
    """Whole records, which had been acknowledged: nobody would send them again, and the learner would wait in vain."""
    deadline_s = 200
    process = start(
        *(tmp_path, "steps=100000", "learner.options.step_s=0.1", "weights.transport=zmq"),
        f"learner.batch_deadline_s={deadline_s}",
    )
    wait_for_step(tmp_path, 3)
    victim = pid_of(tmp_path, BROKER)
    os.kill(victim, signal.SIGSTOP)
    path = tmp_path / "simulated" / "broker.log"
    content = path.read_bytes()
    ends = list(record_ends(content))
    path.write_bytes(content[: ends[len(ends) // 2]])
    begin = time.monotonic()
    ends_in_one_line(process, tmp_path, victim, {path: content})
    assert time.monotonic() - begin < deadline_s


def record_ends(log: bytes) -> Iterator[int]:
    end = write_ahead._BEGIN
    while len(log) - end >= (head := write_ahead._HEAD.size + write_ahead._CHECK.size):
        size, _ = write_ahead._HEAD.unpack(log[end : end + write_ahead._HEAD.size])
        end += head + size
        yield end


def ends_in_one_line(process: subprocess.Popen[str], tmp_path: Path, victim: int, files: dict[Path, bytes]) -> None:
    """`files`: that were damaged, with what they were before."""
    os.kill(victim, signal.SIGKILL)
    process.wait(timeout=240)
    for path, content in files.items():
        path.write_bytes(content)  # `finish` reads run.json
    summary = finish(process, tmp_path, code=1)
    assert files and any(str(path) in summary["error"] for path in files), summary["error"]
    assert "is damaged" in summary["error"] and "resume=CHECKPOINT" in summary["error"]
    assert "\n" not in summary["error"]

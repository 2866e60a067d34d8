"""A file of a running run's folder is damaged, and then whoever reads it again is killed: one line with its name."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

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
    os.kill(victim, signal.SIGSTOP)  # and so everyone: nothing of it is written anew
    files = list((tmp_path / "simulated").glob(name))
    whole = {path: path.read_bytes() for path in files}
    for path, content in whole.items():
        middle = len(content) // 2
        path.write_bytes(content[: middle // 2] + b"\xff" * middle + content[middle // 2 + middle :])
    os.kill(victim, signal.SIGKILL)

    process.wait(timeout=240)
    for path, content in whole.items():
        path.write_bytes(content)  # `finish` reads run.json
    summary = finish(process, tmp_path, code=1)
    assert files and any(str(path) in summary["error"] for path in files), summary["error"]
    assert "is damaged" in summary["error"] and "resume=CHECKPOINT" in summary["error"]
    assert "\n" not in summary["error"]

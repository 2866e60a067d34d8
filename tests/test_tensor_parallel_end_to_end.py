"""Engines of two ranks in the complete system: every channel that CPUs have reaches both, and every token agrees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_end_to_end_real import nothing_is_left, system
from tests.test_lora_end_to_end import steps_of

SETTINGS = (
    "generator.tensor_parallel=2",
    "algo.entropy_coef=0.1",  # an untrained model earns nothing, and would not move
    "alarms.exact=1e-4",
    "steps=3",
    "sampling.max_tokens=96",
    "eval.tasks=0",
    "tracking.wandb=disabled",
)
CHANNELS = {
    "shm": ("weights.transport=shm",),
    "tcp": ("weights.transport=tcp", "network.transport=tcp"),
    "zmq, adapters alone": ("weights.transport=zmq", "model.lora={rank: 4, alpha: 8, serve: adapter}"),
}


@pytest.mark.docs
@pytest.mark.parametrize("channel", CHANNELS)
def test_both_ranks_get_every_version(channel: str, tmp_path: Path) -> None:
    with system(tmp_path, *SETTINGS, *CHANNELS[channel]) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    nothing_is_left(tmp_path)

    rows = steps_of(tmp_path / "simulated")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["exact/tokens"] > 50 and row["exact/unknown"] == 0 and row["exact/max"] < 1e-4 for row in rows)
    assert json.loads((tmp_path / "simulated" / "run.json").read_text())["config"]["generator"]["tensor_parallel"] == 2

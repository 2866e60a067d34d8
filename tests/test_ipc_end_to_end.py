"""Channel `ipc` in the complete system, on a CPU: vLLM loads what stands in the learner's blocks, and tokens agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_end_to_end_real import nothing_is_left, system
from tests.test_lora_end_to_end import steps_of

SETTINGS = (
    "weights.transport=rl.weights.device.ipc:IPC",  # whose name is refused on a CPU
    "learner.ranks=1",
    "algo.entropy_coef=0.1",  # an untrained model earns nothing, and would not move
    "alarms.exact=1e-4",
    "steps=4",
    "sampling.max_tokens=96",
    "eval.tasks=0",
    "tracking.wandb=disabled",
)


@pytest.mark.docs
@pytest.mark.parametrize("served", [[], ["model.lora={rank: 4, alpha: 8, serve: adapter}"]], ids=["whole", "adapters"])
def test_every_version_is_loaded_in_place_and_proven(served: list[str], tmp_path: Path) -> None:
    with system(tmp_path, *SETTINGS, *served) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    nothing_is_left(tmp_path)

    folder = tmp_path / "simulated"
    rows = steps_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["exact/tokens"] > 50 and row["exact/unknown"] == 0 and row["exact/max"] < 1e-4 for row in rows)

    versions = [json.loads(line) for line in (folder / "versions.jsonl").read_text().splitlines()]
    assert len({version["checksum"] for version in versions} - {None}) == len(versions) == 5
    sync = json.loads((folder / "summary.json").read_text())["weight_sync"]
    assert sync["count"] >= 2 and sync["failed"] == 0

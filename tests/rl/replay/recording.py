"""A run of the real learner, recorded as a run's folder has it: batches, metrics, digests, checkpoints."""

from __future__ import annotations

import json
import time
from pathlib import Path

from msgspec.structs import replace

from rl.store.batch_files import write_batch_part
from rl.wire.messages import BatchPart, BatchRequest, Metrics
from rl.wire.run import RunFile
from tests.conftest import save_run
from tests.rl.learner.learner_harness import Harness, make_batch
from tests.rl.learner.test_training import SETTINGS
from tests.rl.learner.tiny_policies import VOCAB, save_tiny

STEPS = 6
RECORDING = (*SETTINGS, f"steps={STEPS}", "learner.checkpoint_every=3", "learner.keep_checkpoints=9")


def batch(step: int, ranks: int, timeline: int = 0) -> list[BatchPart]:
    return make_batch(step, ranks=ranks, vocab=VOCAB, version=max(0, step - 1), timeline=timeline)


def begin(folder: Path, *overrides: str) -> RunFile:
    return save_run(*RECORDING, "tracking.replay=full", *overrides, model_folder=save_tiny(folder / "model"))


def train(harness: Harness, first: int, last: int) -> None:
    """Serve the batches of these steps, and keep what broker and supervisor would."""
    for step in range(first, last):
        assert harness.take(BatchRequest).step == step
        send(harness, step)
        keep_row(harness, harness.take(Metrics))


def send(harness: Harness, step: int, timeline: int = 0) -> None:
    together = harness.run.config.learner.context_parallel
    different = batch(step, harness.ranks // together, timeline)
    parts = [replace(different[rank // together], rank=rank) for rank in range(harness.ranks)]
    for part in parts:
        write_batch_part(harness.run.folder, part)
    harness.send_batch(parts)


def keep_row(harness: Harness, row: Metrics) -> None:
    with (harness.run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": row.step, "time": time.time()} | row.values) + "\n")


def restart(harness: Harness) -> int:
    """Kill the ranks. Returns the step at which the next ones begin."""
    harness.restart()
    request = harness.take(BatchRequest)
    harness.inbox.insert(0, request)
    return request.step


def without_sockets(folder: Path) -> None:
    """A copy of the folder can be made."""
    for path in folder.iterdir():
        if path.is_socket():
            path.unlink()

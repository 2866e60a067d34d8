"""Two ranks of the real learner die and come back: every step and every version is byte for byte what it was to be."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.wire.messages import BatchPart, BatchRequest, Metrics
from rl.wire.run import RunFile
from tests.conftest import save_run
from tests.rl.learner.learner_harness import Harness, make_batch
from tests.rl.learner.test_training import SETTINGS
from tests.rl.learner.tiny_policies import VOCAB, save_tiny

STEPS = 6
SAME = ("train/loss", "train/grad_norm", "train/lr", "critic/loss", "loss/entropy", "tokens/trained")
OVERRIDES = (
    *SETTINGS,
    f"steps={STEPS}",
    "learner.ranks=2",
    "learner.checkpoint_every=3",
    "learner.warmup_steps=3",
    "algo.kl.coef=0.1",
    "algo.critic={}",
    "algo.advantage=gae",
)


def batch(step: int) -> list[BatchPart]:
    return make_batch(step, ranks=2, vocab=VOCAB, version=max(0, step - 1))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFile]:
    made = save_run(*OVERRIDES, model_folder=save_tiny(tmp_path / "model"))
    yield made
    shutil.rmtree(made.folder)


def train(harness: Harness, first: int, last: int) -> dict[int, Metrics]:
    """Serve the batches of these steps; their rows by step."""
    return {step: harness.train([batch(step)])[0] for step in range(first, last)}


def begin_batch(harness: Harness, step: int) -> None:
    """Returns anywhere in the step."""
    assert harness.take(BatchRequest).step == step
    harness.send_batch(batch(step))
    time.sleep(0.05)


def restart(harness: Harness) -> int:
    """The step at which the next ranks begin."""
    harness.restart()
    request = harness.take(BatchRequest)
    harness.inbox.insert(0, request)
    return request.step


def checksums(run: RunFile) -> list[tuple[int, int, int]]:
    lines = map(json.loads, (run.folder / "versions.jsonl").read_text().splitlines())
    return [(line["timeline"], line["n"], line["checksum"]) for line in lines]


@pytest.mark.docs
def test_deaths_change_no_byte(run: RunFile, tmp_path: Path) -> None:
    """In mid-step before any checkpoint, in mid-step after one, and right after a publication, all in one run."""
    other = save_run(*OVERRIDES, model_folder=run.model_folder)
    with Harness(other) as harness:
        undisturbed = train(harness, 0, STEPS)
        harness.finish()
    whole = checksums(other)
    shutil.rmtree(other.folder)

    with Harness(run) as harness:
        rows = train(harness, 0, 1)
        begin_batch(harness, 1)
        assert restart(harness) == 0
        rows |= train(harness, 0, 4)
        begin_batch(harness, 4)
        assert restart(harness) == 3
        rows |= train(harness, 3, 5)
        assert restart(harness) == 3
        rows |= train(harness, 3, STEPS)
        harness.finish()

    assert checksums(run) == whole, "every version once, in one timeline, with the same bytes"
    for step in range(STEPS):
        for name in SAME:
            assert rows[step].values.get(name) == undisturbed[step].values.get(name), (step, name)

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rl.learner.learner_harness import Harness
from tests.rl.replay.recording import STEPS, begin, restart, train, without_sockets


@pytest.fixture(scope="package")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of one rank."""
    run = begin(tmp_path_factory.mktemp("one"), "learner.minibatches=1")
    with Harness(run) as harness:
        train(harness, 0, STEPS)
        harness.finish()
    without_sockets(run.folder)
    yield run.folder
    shutil.rmtree(run.folder)


@pytest.fixture(scope="package")
def deadly_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two ranks, with a critic and a reference, whose learner died three times."""
    others = ("learner.ranks=2", "algo.kl.coef=0.1", "algo.critic={}", "algo.advantage=gae")
    run = begin(tmp_path_factory.mktemp("two"), *others)
    with Harness(run) as harness:
        train(harness, 0, 1)
        assert restart(harness) == 0
        train(harness, 0, 4)
        assert restart(harness) == 3
        train(harness, 3, 5)
        assert restart(harness) == 3
        train(harness, 3, STEPS)
        harness.finish()
    without_sockets(run.folder)
    yield run.folder
    shutil.rmtree(run.folder)

"""Shared fixtures: a run file in a temporary folder, as the supervisor would write it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rl.core.config import load_config
from rl.core.run import RunFile

MakeRun = Callable[..., RunFile]
BASE_PORT = 20_000 + os.getpid() % 600 * 20
"""Twenty ports of this test process alone, below those the kernel gives to outgoing connections."""


@pytest.fixture(autouse=True, scope="module")
def own_environment() -> Iterator[None]:
    """What a module's libraries put into the environment (vLLM: LD_PRELOAD) stays in that module."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def make_run() -> Iterator[MakeRun]:
    """`make_run("rollout.alpha=2", train_tasks=100)`: a saved RunFile whose folders vanish after the test."""
    folders: list[Path] = []

    def make(*overrides: str, **fields: object) -> RunFile:
        folder = Path(tempfile.mkdtemp(prefix="fresco-test-"))
        folders.append(folder)

        values: dict[str, object] = {
            "config": load_config(None, list(overrides)),
            "run_id": uuid.uuid4().hex[:8],
            "folder": folder,
            "socket_folder": folder,
            "device": "cpu",
            "train_tasks": 1000,
            "eval_tasks": 16,
            "started_at": time.time(),
        }

        run = RunFile.model_validate(values | fields)
        run.save()
        return run

    yield make
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)

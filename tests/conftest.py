"""Shared fixtures: a run file in a temporary folder, as the supervisor would write it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rl.config.schema import load_config
from rl.wire.columns import COLUMNS
from rl.wire.run import RunFile
from rl.wire.sockets import make_curve_key
from tests.cutting import only_new_connections

__all__ = ["MakeRun", "only_new_connections", "save_run"]

MakeRun = Callable[..., RunFile]
# Where this is set, as in many containers, each process compiles every module anew: half of a run's CPU seconds.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# How long an example takes is the machine's.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


@pytest.fixture(autouse=True, scope="module")
def own_environment() -> Iterator[None]:
    """What a module's libraries put into the environment (vLLM: LD_PRELOAD) stays in that module."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True, scope="module")
def own_columns() -> Iterator[None]:
    """What a module registers stays in it: a process of a run has one configuration, a test process has many."""
    before = dict(COLUMNS)
    yield
    COLUMNS.clear()
    COLUMNS.update(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files begin first, so that at the end no worker has one to itself."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def save_run(*overrides: str, **fields: object) -> RunFile:
    """A saved RunFile in a new folder with a short path; the caller removes the folder."""
    folder = Path(tempfile.mkdtemp(prefix="fresco-test-"))
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
    make_curve_key(run.folder)
    run.save()
    return run


@pytest.fixture
def own_table() -> Iterator[None]:
    """Columns registered in a test are gone after it."""
    before = dict(COLUMNS)
    yield
    COLUMNS.clear()
    COLUMNS.update(before)


@pytest.fixture
def make_run() -> Iterator[MakeRun]:
    """`make_run("rollout.alpha=2", train_tasks=100)`: a saved RunFile whose folders vanish after the test."""
    runs: list[RunFile] = []

    def make(*overrides: str, **fields: object) -> RunFile:
        runs.append(save_run(*overrides, **fields))
        return runs[-1]

    yield make
    for run in runs:
        shutil.rmtree(run.folder, ignore_errors=True)

"""Generated tasks, made once per choice of packages, count and seed, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence

from filelock import FileLock

from envs.swe.generate import generate, write_tasks
from envs.swe.packages import PACKAGES
from envs.swe.sandbox import Backend
from envs.swe.tasks import SweTask, load_tasks
from envs.swe.workplaces import Workplaces


def generated_tasks(
    backend: Backend, packages: Sequence[str], count: int, seed: int, workplaces: Workplaces
) -> list[SweTask]:
    """Blocks while they are made, a few seconds each; other processes wait. Raises PackageError."""
    pinned = [PACKAGES[name] for name in packages]
    key = json.dumps([[package.sha256 for package in pinned], count, seed])
    path = workplaces.cache / f"tasks-{hashlib.sha256(key.encode()).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{path}.lock"):
        if not path.exists():
            _log(f"swe: generating {count} tasks from {', '.join(packages)}")
            write_tasks(generate(backend, pinned, count, seed, workplaces, _log), path)
    return load_tasks(str(path))


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

"""Generated tasks, made once per choice of packages, count and seed, and kept in the cache folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from envs.sandbox import Backend
from envs.swe.checkout_cache import CheckoutCache
from envs.swe.generate import generate, write_tasks
from envs.swe.packages import PACKAGES
from envs.swe.tasks import SweTask, load_tasks
from rl.core.made_once import digest, made_once, to_stderr


def generated_tasks(
    backend: Backend, packages: Sequence[str], count: int, seed: int, checkouts: CheckoutCache
) -> list[SweTask]:
    """Blocks while they are made, a few seconds each; other processes wait. Raises PackageError."""
    pinned = [PACKAGES[name] for name in packages]
    key = json.dumps([[package.sha256 for package in pinned], count, seed])

    def make(draft: Path) -> None:
        to_stderr(f"swe: generating {count} tasks from {', '.join(packages)}")
        write_tasks(generate(backend, pinned, count, seed, checkouts, to_stderr), draft)

    return load_tasks(str(made_once(checkouts.cache / f"tasks-{digest(key)}.jsonl", make)))

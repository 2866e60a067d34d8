"""Parts of the measuring kit that go wrong. A process of its own carries each out, and imports nothing large for it."""

from __future__ import annotations

import subprocess
import time

from experiments.gpu.part import Result


def slow(result: Result, device: str) -> None:
    """Notes something, and goes on for ever, as does what it has begun."""
    child = subprocess.Popen(["sleep", "1000"])
    result.note("child", child.pid)
    time.sleep(1000)


def broken(result: Result, device: str) -> None:
    result.note("first", 1)
    raise RuntimeError(device)


def half_broken(result: Result, device: str) -> None:
    """Its cases fail as code does, and as a watched command does."""
    for name, error in (("first", RuntimeError(device)), ("second", SystemExit("it ended too soon"))):
        with result.case(name):
            raise error
    result.note("third", 3)

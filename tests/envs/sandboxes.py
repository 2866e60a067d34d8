"""Shared by the tests of sandboxes: short ways to run shell and Python, and templates."""

from __future__ import annotations

import sys
from pathlib import Path

from envs.sandbox import Command, Limits, Result, Sandbox

PYTHON = str(Path(sys.base_prefix).resolve() / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
LIMITS = Limits(
    timeout_s=60, memory_bytes=256 << 20, processes=48, file_bytes=8 << 20, disk_bytes=32 << 20, output_bytes=4096
)
"""Of attempts to escape or to use up the host."""


def sh(sandbox: Sandbox, script: str, timeout_s: float | None = None) -> Result:
    return sandbox.run(Command(["sh", "-c", script], timeout_s=timeout_s))


def python(sandbox: Sandbox, code: str, timeout_s: float | None = None) -> Result:
    return sandbox.run(Command([PYTHON, "-I", "-c", code], timeout_s=timeout_s))


def world_writable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o777)
    return folder

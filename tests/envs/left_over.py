"""What programs in a sandbox have left behind, on the machine and in the folder of temporary files."""

from __future__ import annotations

import time
from pathlib import Path

import psutil


def running(marker: str) -> list[str]:
    """The commands of this machine that have the marker in them."""
    commands = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    return [command for command in commands if marker in command]


def left_over(marker: str, folder: Path) -> list[str]:
    return [*running(marker), *map(str, folder.glob("fresco-*"))]


def nothing_is_left(marker: str, folder: Path) -> bool:
    """Now, or when the kernel has carried out the kill: it ends the processes of a namespace after the first one."""
    deadline = time.monotonic() + 60
    while found := left_over(marker, folder):
        assert time.monotonic() < deadline, found
        time.sleep(0.01)
    return True

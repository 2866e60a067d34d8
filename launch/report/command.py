"""The command `fresco report`."""

from __future__ import annotations

import argparse
from pathlib import Path

from launch.report.gather import gather
from launch.report.page import write_page
from rl.config.schema import ConfigError


def report(arguments: argparse.Namespace) -> int:
    """Write the file. Raises ConfigError where there is no run, or nowhere to write."""
    print(f"report: {write_report(arguments.runs, arguments.out)}")
    return 0


def write_report(folders: list[Path], out: Path | None = None) -> Path:
    """Write a report of runs in whatever state to `out`, else `report.html` in the folder of the first. Raises
    ConfigError."""
    missing = [str(folder) for folder in folders if not (folder / "run.json").exists()]
    if missing:
        raise ConfigError(f"{missing[0]!r} is no folder of a run (no run.json)")

    path = out or folders[0] / "report.html"
    page = [gather(folder) for folder in folders]
    try:
        write_page(page, path)
    except OSError as error:
        raise ConfigError(f"--out {str(path)!r}: cannot be written ({error.strerror}); name another file") from None
    return path

"""One run under a schedule: started as a user starts it, watched and disturbed from outside."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from experiments.chaos.checks import left_behind, violations
from experiments.chaos.inject import RAISING, Injector
from experiments.chaos.schedule import Fault
from rl.config.schema import load_config

_LOOK_S = 0.1
_PREPARE_S = 1800.0  # until the processes begin: a tiny model is made first, once
_DISK_MB = 256  # of the file system that `disk` fills


@dataclass
class Played:
    """What was seen. Times are of the monotonic clock."""

    steps: list[float] = field(default_factory=list)
    """When each step was trained for the first time."""
    faults: list[tuple[float, Fault, str]] = field(default_factory=list)
    """The faults: when, which, and what was done."""
    violations: list[str] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def full_disk(self) -> bool:
        """Whether the disk was full at a time, and nothing that comes after it has to happen."""
        return any(fault.kind == "disk" for _, fault, _ in self.faults)

    @property
    def seconds(self) -> float:
        """The seconds from the first step to the last."""
        return self.steps[-1] - self.steps[0]


def play(recipe: str | Path, overrides: Sequence[str], schedule: Sequence[Fault], stuck_s: float) -> Played:
    """Run the recipe to its end under these faults. A run without a new step for `stuck_s` is ended."""
    played = Played()
    with _workplace(disk=any(fault.kind == "disk" for fault in schedule)) as (runs, temporary):
        mine = [f"runs={runs}", "name=chaos", "tracking.wandb=disabled", "tracking.replay=full", *overrides]
        last_step = load_config(recipe, mine).steps

        output_file = temporary.with_name("output")
        with output_file.open("wb") as output:
            command = [sys.executable, "-m", "launch.cli", "run", recipe, *mine]
            site = temporary.with_name("site")
            site.mkdir()
            (site / "sitecustomize.py").write_text(RAISING)
            paths = [str(site), os.environ.get("PYTHONPATH", "")]
            environment = os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
            process = psutil.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)

        watch = _Watch(process, runs, list(schedule), played)
        watch.until_the_end(stuck_s)

        if not played.full_disk:
            played.violations += violations(runs / "chaos", last_step, process.returncode)
        elif not any(_names_full_disk(line) for line in output_file.read_text().splitlines()):
            played.violations.append("no line says that the disk is full")
        played.violations += left_behind(watch.processes, watch.run_ids, temporary)

        with contextlib.suppress(OSError, ValueError):
            played.summary = json.loads((runs / "chaos" / "summary.json").read_text())
        if played.violations:
            kept = tempfile.mkdtemp(prefix="fresco-chaos-kept-")
            shutil.copy(output_file, kept)
            shutil.copytree(runs, kept, dirs_exist_ok=True, ignore=shutil.ignore_patterns("ipc", "filler"))
            played.violations.append(f"what the run wrote is kept in {kept}")
    return played


def _names_full_disk(line: str) -> bool:
    return line.startswith("fresco: ") and "No space left" in line


class _Watch:
    """A watch over one run, from its start until it has ended."""

    def __init__(self, process: psutil.Popen, runs: Path, schedule: list[Fault], played: Played) -> None:
        self.processes: set[psutil.Process] = {process}  # all that the run ever had
        self.run_ids: set[str] = set()
        self._process = process
        self._folder = runs / "chaos"
        self._schedule = schedule  # what is left of it
        self._played = played
        self._injector = Injector(process, runs)
        self._read = (0, 0)  # of the metrics: inode, bytes

    def until_the_end(self, stuck_s: float) -> None:
        moved = time.monotonic()
        while self._process.poll() is None:
            prepared = bool(self.run_ids)
            if self._new_steps() or bool(self.run_ids) != prepared:
                moved = time.monotonic()
            with contextlib.suppress(psutil.NoSuchProcess):
                self.processes.update(self._process.children(recursive=True))

            self._inject_next()
            limit_s = stuck_s if self.run_ids else max(stuck_s, _PREPARE_S)
            if time.monotonic() - moved > limit_s:
                self._played.violations.append(f"no step for {limit_s:g} s after step {len(self._played.steps)}")
                self._process.terminate()  # as Ctrl-C: with its books, and nothing left behind
                moved = math.inf
            time.sleep(_LOOK_S)
        self._new_steps()
        if self._schedule and not self._played.full_disk:
            self._played.violations.append(
                f"{len(self._schedule)} faults met nobody, the first one {self._schedule[0]}"
            )

    def _inject_next(self) -> None:
        """The first fault that is due, if it finds a process."""
        steps = self._played.steps
        if self._schedule and len(steps) >= self._schedule[0].step:
            did = self._injector.inject(self._schedule[0])
            if did is not None:
                self._played.faults.append((time.monotonic(), self._schedule.pop(0), did))

    def _new_steps(self) -> bool:
        """Read on in the metrics. A run that goes on from a checkpoint has a new file, and trains steps again."""
        steps = self._played.steps
        before = len(steps)
        with contextlib.suppress(OSError, KeyError):
            self.run_ids.add(json.loads((self._folder / "run.json").read_text())["run_id"])
            with (self._folder / "metrics.jsonl").open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(self._read[1] if inode == self._read[0] else 0)
                text = file.read()
                whole, _, rest = text.rpartition(b"\n")
                self._read = inode, file.tell() - len(rest)

            for row in map(json.loads, whole.splitlines()):
                if "train/loss" in row and row["step"] > len(steps):
                    steps += [time.monotonic()] * (row["step"] - len(steps))
        return len(steps) > before


@contextlib.contextmanager
def _workplace(*, disk: bool) -> Iterator[tuple[Path, Path]]:
    """(folder of runs, TMPDIR); with `disk` the former is a small file system of its own, for which it needs root."""
    with tempfile.TemporaryDirectory(prefix="fresco-chaos-") as name:
        runs = Path(name) / "runs"
        temporary = Path(name) / "tmp"
        runs.mkdir()
        temporary.mkdir()
        if disk:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_MB}m", "none", runs], check=True)

        try:
            yield runs, temporary
        finally:
            if disk:
                subprocess.run(["umount", "--lazy", runs], check=True)

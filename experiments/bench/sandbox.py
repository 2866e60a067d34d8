"""Sandboxes: life cycle, throughput, cost per command against the bare process, and many alive at once.

python -m experiments.bench sandbox [--rounds 200] [--alive 200] [--workers 4] [--out FILE.json]

All figures of one call come from one process within a few seconds, so that their ratios hold on a busy machine too.
CPU time counts this process and everything it reaped; on an idle core the wall time of one round approaches it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envs.sandbox import Backend, Command, Limits, Sandbox, Template, make_backend
from experiments.bench._timing import interleaved

BOUND_MS = 20.0
BOUND_PER_S = 100.0
LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20)
TRUE = Command(["true"])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--alive", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        template = Template(Path(folder))
        (template.folder or Path()).chmod(0o777)
        backend = make_backend(slots=options.alive, threads=options.workers)
        try:
            measured = measure(backend, template, options.rounds, options.alive, options.workers)
        finally:
            backend.close()
    measured["load_average"] = os.getloadavg()[0]
    for name, value in measured.items():
        print(f"{name}: {value:.2f}")
    print(f"bounds: life_cycle_ms < {BOUND_MS:g}, life_cycles_per_s >= {BOUND_PER_S:g}")
    if options.out:
        options.out.write_text(json.dumps(measured, indent=2) + "\n")


def measure(backend: Backend, template: Template, rounds: int, alive: int, workers: int) -> dict[str, float]:
    """Milliseconds (medians) and rates by name."""

    def life_cycle() -> None:
        sandbox = backend.open(template, LIMITS)
        assert sandbox.run(TRUE).ok
        sandbox.close()

    def bare() -> None:
        subprocess.run(["true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)

    life_cycle()  # mounts the template, makes the first control group
    measured: dict[str, float] = {}
    sandbox = backend.open(template, LIMITS)
    timed = interleaved({"bare_ms": bare, "command_ms": lambda: _checked(sandbox), "life_cycle_ms": life_cycle}, rounds)
    sandbox.close()
    for name, (wall_ms, cpu_ms) in timed.items():
        measured[name] = wall_ms
        measured[name.replace("_ms", "_cpu_ms")] = cpu_ms
    measured["command_over_bare_ms"] = measured["command_ms"] - measured["bare_ms"]
    with ThreadPoolExecutor(workers) as pool:
        begin = time.perf_counter()
        list(pool.map(lambda _: life_cycle(), range(rounds)))
        measured["life_cycles_per_s"] = rounds / (time.perf_counter() - begin)
        begin = time.perf_counter()
        sandboxes = list(pool.map(lambda _: backend.open(template, LIMITS), range(alive)))
        measured["alive"] = len(sandboxes)
        measured["open_all_s"] = time.perf_counter() - begin
        measured["command_ms_with_all_alive"] = interleaved({"": lambda: _checked(sandboxes[0])}, 30)[""][0]
        begin = time.perf_counter()
        list(pool.map(_checked, sandboxes))
        measured["commands_per_s_with_all_alive"] = alive / (time.perf_counter() - begin)
        list(pool.map(lambda each: each.close(), sandboxes))
    return measured


def _checked(sandbox: Sandbox) -> None:
    assert sandbox.run(TRUE).ok


if __name__ == "__main__":
    main(sys.argv[1:])

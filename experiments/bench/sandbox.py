"""Sandboxes: life cycle, throughput, cost per command against the bare process, and many alive at once.

python -m experiments.bench sandbox [--rounds 200] [--alive 200] [--workers 4] [--out FILE.json]

All figures of one call come from one process within a few seconds, so that their ratios hold on a busy machine too.
CPU time counts this process and everything it reaped; on an idle core the wall time of one round approaches it.
"""

from __future__ import annotations

import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from envs.sandbox import Backend, Command, Limits, Sandbox, Template, make_backend
from experiments.bench._measuring import Work, alternate, milliseconds, parser_of, report, timed

BOUND_MS = 20.0
BOUND_PER_S = 100.0
LIMITS = Limits(memory_bytes=256 << 20, disk_bytes=64 << 20)
TRUE = Command(["true"])


def main(argv: list[str]) -> None:
    parser = parser_of("sandbox", __doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--alive", type=int, default=200)
    parser.add_argument("--workers", type=int, default=4)
    options = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as folder:
        template = Template(Path(folder))
        (template.folder or Path()).chmod(0o777)
        backend = make_backend(slots=options.alive, threads=options.workers)
        try:
            measured = measure(backend, template, options.rounds, options.alive, options.workers)
        finally:
            backend.close()

    report(measured, f"life_cycle_ms < {BOUND_MS:g}, life_cycles_per_s >= {BOUND_PER_S:g}", options.out)


def measure(backend: Backend, template: Template, rounds: int, alive: int, workers: int) -> dict[str, float]:
    """Milliseconds (medians) and rates by name."""

    def life_cycle() -> None:
        sandbox = backend.open(template, LIMITS)
        assert sandbox.run(TRUE).ok
        sandbox.close()

    def bare() -> None:
        subprocess.run(["true"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)

    life_cycle()  # mounts the template, makes the first control group
    sandbox = backend.open(template, LIMITS)
    works: dict[str, Work] = {"bare": bare, "command": lambda: _checked(sandbox), "life_cycle": life_cycle}
    measured = milliseconds(alternate(works, rounds))
    sandbox.close()

    measured["command_over_bare_ms"] = measured["command_ms"] - measured["bare_ms"]
    return measured | many_at_once(backend, template, life_cycle, rounds, alive, workers)


def many_at_once(
    backend: Backend, template: Template, life_cycle: Work, rounds: int, alive: int, workers: int
) -> dict[str, float]:
    """Rates with `workers` threads, and what a command costs beside `alive` open sandboxes."""
    with ThreadPoolExecutor(workers) as pool:
        cycles = timed(lambda: list(pool.map(lambda _: life_cycle(), range(rounds))))

        sandboxes: list[Sandbox] = []
        opening = timed(lambda: sandboxes.extend(pool.map(lambda _: backend.open(template, LIMITS), range(alive))))
        one = milliseconds(alternate({"command": lambda: _checked(sandboxes[0])}, 30))
        commands = timed(lambda: list(pool.map(_checked, sandboxes)))
        list(pool.map(lambda each: each.close(), sandboxes))

    return {
        "life_cycles_per_s": rounds / cycles.wall_s,
        "alive": len(sandboxes),
        "open_all_s": opening.wall_s,
        "command_ms_with_all_alive": one["command_ms"],
        "commands_per_s_with_all_alive": alive / commands.wall_s,
    }


def _checked(sandbox: Sandbox) -> None:
    assert sandbox.run(TRUE).ok

"""The audit of every environment's verifier, in one table: `python -m experiments.audit [NAME…]`.

Solutions of training tasks are changed into certainly wrong and certainly equal ones, and judged again, as
`fresco env check` does. One file for each environment goes to `experiments/results/audit/`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import sys
import time
from dataclasses import asdict
from typing import Any

from envs.audit.auditor import Change, Tally, audit, cpu_s
from envs.registry import make_family
from experiments.bench._ratios import machine
from experiments.results.pages import RESULTS
from rl.config.schema import load_config
from rl.observe.intervals import wilson
from rollout.episodes.environment import EnvironmentFamily

CHAIN_SUM = "env.options={dataset: chain_sum}"
CHECKED: dict[str, tuple[int, list[str]]] = {
    "math": (200, []),
    "reasoning_gym": (100, [CHAIN_SUM]),
    "dataset": (100, ["env.options={source: experiments.own_reward:rows, eval_count: 128, reward: exact}"]),
    "code": (16, []),
    "swe": (3, ["env.max_turns=30", "env.options={generated_count: 4, eval_count: 1}"]),
}
"""How many solutions, with which fields."""


async def _solution(family: EnvironmentFamily, task: Any) -> str:
    environment = family.make()
    try:
        await environment.reset(task)
        return await environment.gold()  # type: ignore[attr-defined, no-any-return]
    finally:
        await environment.close()


async def table(name: str) -> dict[str, object]:
    """One row: what was found, with 95 % intervals, and the CPU time of an audited answer."""
    count, fields = CHECKED[name]
    family = make_family(load_config(None, [f"env.name={name}", *fields]))
    await family.start()
    tally = Tally()

    begin, clock = cpu_s(), time.monotonic()
    try:
        there = family.task_count("train")
        for number in range(min(count, there)):
            task = family.task("train", number * there // min(count, there))
            said = await _solution(family, task)
            if name == "swe" or await family.judged(Change("as it is", True, task, said)):  # type: ignore[attr-defined]
                tally.add(await audit(family, task, said, random.Random(number)))
    finally:
        await family.stop()

    spent = cpu_s() - begin
    return {
        "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
        **asdict(tally),
        "accept_95": wilson(tally.accepted, tally.wrong),
        "refuse_95": wilson(tally.refused, tally.equal),
        "cpu_ms": 1000 * spent / max(1, tally.answers),
        "wall_s": time.monotonic() - clock,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.audit", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(CHECKED)}; all of them")
    names = parser.parse_args(argv).names
    for name in names:
        if name not in CHECKED:
            sys.exit(f"audit: {name!r} is none of {', '.join(CHECKED)}")

    for name in names or list(CHECKED):
        row = asyncio.run(table(name))
        folder = RESULTS / "audit"
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(row, indent=1) + "\n")
        print(name, {key: row[key] for key in ("answers", "wrong", "accepted", "equal", "refused", "cpu_ms")})


if __name__ == "__main__":
    main()

"""`fresco replay RUN [--from N] [--to M] [key=value …]`: the steps of a run again, from what it recorded.

Unchanged it proves that this code and this machine compute what the run computed. With changed fields it is a
counterfactual on the run's own batches, and every row says how far it can be trusted.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import msgspec

from launch.terminal import say
from rl.config.schema import Config, ConfigError
from rl.observe.alarms import read_alarms
from rl.replay.recorded import COMPUTES, Recorded
from rl.replay.replay import RECORDED, Request, Row, replayed

BOUND = {"float32": 1e-3, "bfloat16": 0.1}
"""The largest difference of a metric, as a share of it or of 1, where a step is computed in another way."""
_HEADS = ("loss", "gradient", "entropy", "kl", "trust ess", "trust kl")
_SHOWN = ("train/loss", "train/grad_norm", "loss/entropy", "loss/kl_behavior", "trust/ess", "trust/kl")


def trust_of(text: str) -> tuple[float, float]:
    """The least effective sample size and the largest KL, as `0.5,0.05` says them. Raises ConfigError."""
    try:
        ess, kl = (float(each) for each in text.split(","))
        if math.isnan(ess + kl):
            raise ValueError
    except ValueError:
        raise ConfigError(f"--trust {text}: give least effective sample size, largest KL: 0.5,0.05") from None
    return ess, kl


def replay(arguments: argparse.Namespace) -> int:
    """0, or 1 where an unchanged step comes out otherwise, or nothing tells that it does not. Raises ConfigError."""
    recorded = Recorded(arguments.run)
    first, last = recorded.span(arguments.first, arguments.last)
    trust = trust_of(arguments.trust)
    config = recorded.changed(arguments.overrides)

    exact = arguments.exact if arguments.exact is not None else recorded.config.alarms.exact
    fields = {item.partition("=")[0] for item in arguments.overrides}
    if arguments.trail and (fields - COMPUTES or not arguments.trail.absolute().parent.is_dir()):
        raise ConfigError(f"--trail {arguments.trail}: name a file in a folder that is there, and change no field")

    variants = {"changed": config} if fields - COMPUTES else {}
    computed = config if fields and not variants else None
    request = Request(first, last, variants, computed, trust, trail=bool(arguments.trail), exact=exact is not None)

    print(f"{'step':>6}  {'':20} {' '.join(f'{name:>9}' for name in _HEADS)} {'gain':>16}")
    rows = []
    for row in replayed(recorded, request):
        rows.append(row)
        print(_line(row), flush=True)
    own = [row for row in rows if row.variant == RECORDED]
    if arguments.trail:
        arguments.trail.write_bytes(msgspec.json.encode({row.n: row.trail for row in own if row.values}))
    inexact = exact is not None and _sampled_otherwise(recorded, own, exact)
    return _verdict(recorded, own, config, arguments.overrides) or int(inexact)


def _sampled_otherwise(recorded: Recorded, rows: list[Row], limit: float) -> bool:
    """Whether a token was sampled with another probability than its weights give it; which batch was the first, beside
    the alarms of the run."""
    wrong = [row for row in rows if not row.values.get("exact/max", 0.0) <= limit]
    if wrong:
        gap = f"{wrong[0].values['exact/max']:.3g} nats"
        print(f"batch {wrong[0].n - 1} is the first of {len(wrong)} with a token of another probability: {gap}")
        for alarm in read_alarms(recorded.folder):
            say(f"the run raised {alarm.name} {alarm.when}: {alarm.detail}")
    return bool(wrong)


def _line(row: Row) -> str:
    values = row.values
    numbers = " ".join(f"{values[name]:9.4g}" if name in values else " " * 9 for name in _SHOWN)
    gain = f"{values['gain']:+8.4f} ±{values['gain/error']:.4f}" if "gain" in values else ""
    return f"{row.n:>6}  {'BEYOND TRUST' if row.beyond else _same(row):20} {numbers} {gain}".rstrip()


def _same(row: Row) -> str:
    if row.variant != RECORDED:
        return row.variant
    if row.identical:
        return "identical" if row.tensors is not None else "same metrics" if row.compared else "not recorded"
    return f"{len(row.differing)} metrics differ" if row.differing else f"{len(row.tensors or ())} tensors differ"


def _verdict(recorded: Recorded, rows: list[Row], config: Config, overrides: list[str]) -> int:
    steps = [row for row in rows if row.values]
    told = {row.n for row in rows if row.tensors is not None}
    known = [row for row in steps if row.compared or row.n in told]
    if not known:
        unknown = "the run has neither metrics nor digests, so it is not known whether they are what it computed"
        print(f"computed {len(steps)} steps, but {unknown}", file=sys.stderr)
        return 1

    parted = next((row for row in rows if not row.identical), None)
    if parted is None:
        of = f"and the digests of {len(told)} versions" if told else "(no digests were recorded)"
        some = "steps" if len(known) == len(steps) else f"of {len(steps)} steps (the others were not recorded)"
        print(f"identical: {len(known)} {some}, {min(row.compared for row in known)} metrics each {of}")
        return 0

    apart = [(_apart(*pair), name, row.n) for row in steps for name, pair in row.differing.items()]
    worst, name, at = max(apart, default=(0.0, "any metric", parted.n))
    where = f"first at version {parted.n}: {', '.join([*parted.differing, *(parted.tensors or [])][:3])}"
    most = f"the largest difference is {worst:.3g}, of {name} at version {at}"

    bound = BOUND[config.model.dtype]
    if worst <= bound and (overrides or recorded.run.learner_device != "cpu"):
        print(f"within {bound:g} of the run: {most}; {where}")
        return 0
    print(f"NOT the run's numbers, {where}; {most}; fresco bisect looks for the cause", file=sys.stderr)
    return 1


def _apart(value: Any, told: Any) -> float:
    """A difference as a share of what was recorded, or of 1."""
    known = isinstance(value, int | float) and isinstance(told, int | float)
    return abs(value - told) / max(1.0, abs(told)) if known else math.inf

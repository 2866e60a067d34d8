"""`fresco replay RUN [--from N] [--to M] [key=value …]`: the steps of a run again, from what it recorded.

Unchanged it proves that this code and this machine compute what the run computed. With changed fields it is a
counterfactual on the run's own batches, and every row says how far it can be trusted.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import msgspec

from launch.terminal import say
from rl.config.plugins import own_place
from rl.config.schema import Config, ConfigError
from rl.observe.alarms import read_alarms
from rl.replay.recorded import COMPUTES, Recorded
from rl.replay.replay import RECORDED, Request, Row, replayed
from rl.store.checkpoint_folder import CheckpointError

BOUND = {"float32": 1e-3, "bfloat16": 0.1}
"""The largest difference of a metric, as a share of it or of 1, where a step is computed in another way."""
_SHOWN = (
    ("loss", "train/loss", 9, 4),
    ("gradient", "train/grad_norm", 9, 4),
    ("entropy", "loss/entropy", 8, 4),
    ("kl", "loss/kl_behavior", 8, 3),
    ("trust ess", "trust/ess", 9, 3),
    ("trust kl", "trust/kl", 8, 3),
)
_HEAD = f"{'step':>6}  {'':20} {' '.join(f'{name:>{width}}' for name, _, width, _ in _SHOWN)} {'gain':>16}"


class Trust:
    """Whether a variant is still near enough to the run; once it was not, none of its rows is."""

    def __init__(self, text: str) -> None:
        """text: the least effective sample size and the largest KL, as `0.5,0.05`. Raises ConfigError."""
        try:
            self.ess, self.kl = (float(each) for each in text.split(","))
            if math.isnan(self.ess + self.kl):
                raise ValueError
        except ValueError:
            raise ConfigError(f"--trust {text}: give least effective sample size, largest KL: 0.5,0.05") from None
        self._left: set[str] = set()

    def ends(self, row: Row) -> bool:
        """Whether this row is beyond it."""
        values = row.values
        if values.get("trust/ess", 1.0) < self.ess or values.get("trust/kl", 0.0) > self.kl:
            self._left.add(row.variant)
        return row.variant in self._left


def replay(arguments: argparse.Namespace) -> int:
    """0, or 1 where an unchanged step comes out otherwise, or nothing tells that it does not. Raises ConfigError."""
    recorded = Recorded(arguments.run)
    first, last = recorded.span(arguments.first, arguments.last)
    trust = Trust(arguments.trust)
    config = recorded.changed(arguments.overrides)

    exact = arguments.exact if arguments.exact is not None else recorded.config.alarms.exact
    fields = {item.partition("=")[0] for item in arguments.overrides}
    if arguments.trail and (fields - COMPUTES or not arguments.trail.absolute().parent.is_dir()):
        raise ConfigError(f"--trail {arguments.trail}: name a file in a folder that is there, and change no field")

    variants = {"changed": config} if fields - COMPUTES else {}
    computed = config if fields and not variants else None
    request = Request(first, last, variants, computed, trail=bool(arguments.trail), exact=exact is not None)

    print(_HEAD)
    rows = []
    for row in read(recorded, request):
        rows.append(row)
        print(_line(row, trust.ends(row)), flush=True)
    if arguments.trail:
        arguments.trail.write_bytes(msgspec.json.encode({row.n: row.trail for row in rows if row.trail}))
    own = [row for row in rows if row.variant == RECORDED]
    inexact = exact is not None and _sampled_otherwise(recorded, own, exact)
    return _verdict(recorded, own, config, arguments.overrides) or int(inexact)


def _sampled_otherwise(recorded: Recorded, rows: list[Row], limit: float) -> bool:
    """Whether a token was sampled with another probability than its weights give it; which batch was the first, beside
    the alarms of the run."""
    wrong = [row for row in rows if not row.values.get("exact/max", 0.0) <= limit]
    if wrong:
        gap = wrong[0].values["exact/max"]
        where = f"batch {wrong[0].n - 1} is the first of {len(wrong)}"
        print(f"{where} with a token of another probability: {gap:.3g} nats")
        for alarm in read_alarms(recorded.folder):
            say(f"the run raised {alarm.name} {alarm.when}: {alarm.detail}")
    return bool(wrong)


def read(recorded: Recorded, request: Request) -> Iterator[Row]:
    """The rows of a replay. Raises ConfigError where it cannot be."""
    try:
        yield from replayed(recorded, request)
    except (CheckpointError, ValueError) as error:
        if own_place(error):  # in a loss of the user's own
            raise
        raise ConfigError(f"{str(recorded.folder)!r}: {' '.join(str(error).split())}") from None


def _line(row: Row, beyond: bool) -> str:
    values = row.values
    if not values:
        return f"{row.n:>6}  {_same(row)}"

    numbers = " ".join(
        f"{values[name]:>{width}.{digits}g}" if name in values else " " * width for _, name, width, digits in _SHOWN
    )
    gain = f"{values['gain']:+8.4f} ±{values['gain/error']:.4f}" if "gain" in values else ""
    return f"{row.n:>6}  {'BEYOND TRUST' if beyond else _same(row):20} {numbers} {gain}".rstrip()


def _same(row: Row) -> str:
    if row.variant != RECORDED:
        return row.variant
    if row.identical:
        return "identical" if row.tensors is not None else "same metrics" if row.compared else "not recorded"
    return f"{len(row.differing)} metrics differ" if row.differing else f"{len(row.tensors or ())} tensors differ"


def _verdict(recorded: Recorded, rows: list[Row], config: Config, overrides: list[str]) -> int:
    steps = [row for row in rows if row.values]
    parted = next((row for row in rows if not row.identical), None)
    told = {row.n for row in rows if row.tensors is not None}
    known = [row for row in steps if row.compared or row.n in told]
    if not known:
        print(
            f"computed {len(steps)} steps, but the run has neither metrics nor digests to compare them with: it is not "
            "known whether they are the run's",
            file=sys.stderr,
        )
        return 1

    if parted is None:
        of = f"and the digests of {len(told)} versions" if told else "(no digests were recorded)"
        some = "steps" if len(known) == len(steps) else f"of {len(steps)} steps (the others were not recorded)"
        print(f"identical: {len(known)} {some}, {min(row.compared for row in known)} metrics each {of}")
        return 0

    apart = [
        (abs(value - told) / max(1.0, abs(told)) if isinstance(told, int | float) else math.inf, name, row.n)
        for row in steps
        for name, (value, told) in row.differing.items()
    ]
    worst, name, at = max(apart, default=(0.0, "any metric", parted.n))
    bound = BOUND[config.model.dtype]
    where = f"first at version {parted.n}: {', '.join([*parted.differing, *(parted.tensors or [])][:3])}"

    otherwise = bool(overrides) or recorded.run.learner_device != "cpu"
    if otherwise and worst <= bound:
        print(f"within {bound:g} of the run: the largest difference is {worst:.2g}, of {name} at version {at}; {where}")
        return 0

    print(
        f"NOT the run's numbers, {where}; the largest difference is {worst:.3g}, of {name} at version {at}; "
        "fresco bisect looks for the cause",
        file=sys.stderr,
    )
    return 1

"""What a benchmark may say: ratios of interleaved pairs with their spread, on which machine, and whether it was ours.

    with Idle() as idle:
        measured = alternate({"bare": bare, "ours": ours}, rounds=5)
    ratio = ratio_of(measured["ours"], measured["bare"])
    print(ratio, ratio.verdict(at_most=1.05, of="cpu", idle=idle))

A ratio needs at least five pairs. On a machine that others use meanwhile, or with fewer pairs, there is no verdict:
the figures are printed, and neither `met` nor `missed`.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from experiments.bench._measuring import Timing

MIN_PAIRS = 5
BUSY = 0.05
"""Share of the machine's cores that others may use."""

Clock = Literal["cpu", "wall"]


@dataclass(frozen=True)
class Spread:
    """The spread of the pairs' ratios."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The median and the whole range; quartiles instead from eight values on."""
        low, high = (min(values), max(values)) if len(values) < 8 else statistics.quantiles(values, n=4)[::2]
        return cls(statistics.median(values), low, high)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True)
class Ratio:
    """The ratio of two works that took turns: by CPU seconds and by the clock on the wall."""

    cpu: Spread
    wall: Spread
    pairs: int

    def __str__(self) -> str:
        return f"CPU seconds {self.cpu}, wall {self.wall}, {self.pairs} pairs"

    def verdict(self, *, at_most: float, of: Clock, idle: Idle) -> str:
        """`met` or `missed` by the median, or why neither can be said."""
        if refusal := idle.refusal(self.pairs):
            return f"no verdict: {refusal}"
        found = self.cpu if of == "cpu" else self.wall
        return f"{'met' if found.median <= at_most else 'missed'}: at most {at_most:g} by {of}"


def ratio_of(ours: Sequence[Timing], baseline: Sequence[Timing]) -> Ratio:
    """The n-th of ours over the n-th of the baseline. Raises ValueError where they are not pairs."""
    pairs = list(zip(ours, baseline, strict=True))
    return Ratio(
        Spread.of([one.cpu_s / max(other.cpu_s, 1e-9) for one, other in pairs]),
        Spread.of([one.wall_s / other.wall_s for one, other in pairs]),
        len(pairs),
    )


class Idle:
    """Watches how much of the machine others use, from the kernel's books of all cores and of our own processes."""

    def __init__(self) -> None:
        self.others = 0.0
        """Share of the cores that others used while we measured."""

    def __enter__(self) -> Idle:
        self._begin = _books()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        total, busy, ours = (now - then for now, then in zip(_books(), self._begin, strict=True))
        self.others = max(0.0, busy - ours) / max(total, 1e-9)

    def refusal(self, pairs: int = MIN_PAIRS) -> str:
        """Why no verdict can be given; empty if one can."""
        if pairs < MIN_PAIRS:
            return f"{pairs} pairs, at least {MIN_PAIRS} are needed"
        if self.others > BUSY:
            return f"others used {self.others:.0%} of this machine's cores meanwhile"
        return ""

    def told(self, pairs: int) -> str:
        """What stands beside figures that have no aim."""
        refusal = self.refusal(pairs)
        return f"no verdict: {refusal}" if refusal else "the machine was ours"


def machine() -> str:
    """This machine, in words: processor, cores that we may use, system."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{len(os.sched_getaffinity(0))} cores of {model}, Linux {platform.release()}"


def provenance(idle: Idle, ratios: Mapping[str, Ratio] = {}) -> dict[str, Any]:
    """What belongs into every result file."""
    found: dict[str, Any] = {"machine": machine(), "date": time.strftime("%Y-%m-%d")}
    found["others_share"] = round(idle.others, 3)
    if ratios:
        found["ratios"] = {name: asdict(ratio) for name, ratio in ratios.items()}
    return found


def _books() -> tuple[float, float, float]:
    """CPU seconds since some beginning: of all cores, of those in use, and of our own processes."""
    cores = psutil.cpu_times()
    waited = cores.idle + getattr(cores, "iowait", 0.0)
    total = sum(cores) - getattr(cores, "guest", 0.0) - getattr(cores, "guest_nice", 0.0)

    ours = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.Error:
            continue  # it has ended, and its parent has its seconds
        ours += times.user + times.system + times.children_user + times.children_system

    return total, total - waited, ours

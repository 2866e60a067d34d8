"""One environment server or generator that is much slower than its like, by the turns of trained episodes. Pure.

A busy machine makes any process stand still for a while, and what stands still delays all that it holds: up to
1 + alpha batches. So a process counts as slow only if even the fastest quarter of its turns is slow, over so many
batches that one or two such stalls are less than three quarters of them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from rl.observe.alarms import Alarms
from rl.wire.messages import Trajectory
from rollout.broker.actions import BatchSample

_STALLS = 4  # of 1 + alpha batches each, that are looked at
_LEAST_BATCHES = 6
_LEAST_TURNS = 16  # of a process
_MOST_TURNS = 64  # of a process in one batch; more would say no more


@dataclass
class _Turns:
    """Of one batch, by process."""

    servers: dict[int, list[float]] = field(default_factory=dict)  # seconds of a turn
    generators: dict[int, list[float]] = field(default_factory=dict)  # seconds of a token
    tokens: list[float] = field(default_factory=list)  # of a turn

    def add(self, trajectory: Trajectory) -> None:
        for turn in trajectory.turns:
            tokens = max(1, turn.end - turn.start)
            _keep(self.tokens, tokens)
            _keep(self.servers.setdefault(trajectory.server, []), turn.env_s)
            _keep(self.generators.setdefault(turn.generator, []), turn.generate_s / tokens)


class Outliers:
    def __init__(self, alarms: Alarms, alpha: float) -> None:
        self._alarms = alarms
        batches = _STALLS * (1 + math.ceil(alpha))
        self._least_batches = max(_LEAST_BATCHES, 3 * batches // 4)
        self._batches: deque[_Turns] = deque(maxlen=max(_LEAST_BATCHES, batches))

    def batch(self, step: int, samples: list[BatchSample]) -> None:
        turns = _Turns()
        for sample in samples:
            if sample.outcome.payload is not None:
                turns.add(sample.outcome.payload)

        self._batches.append(turns)
        tokens = [count for each in self._batches for count in each.tokens]
        if len(self._batches) < self._least_batches or not tokens:
            return

        self._check("slow-server", "env_server", [each.servers for each in self._batches], "turn", step, 1)
        of_a_turn = median(tokens)
        self._check(
            "slow-generator", "generator", [each.generators for each in self._batches], "token", step, of_a_turn
        )

    def _check(
        self, name: str, role: str, batches: list[dict[int, list[float]]], unit: str, step: int, of_a_turn: float
    ) -> None:
        """batches: seconds of a unit by process, of each; of_a_turn: how many units a turn has."""
        seconds: dict[int, list[float]] = {}
        for each in batches:
            for index, values in each.items():
                seconds.setdefault(index, []).extend(values)
        fastest = {index: _quarter(values) for index, values in seconds.items() if len(values) >= _LEAST_TURNS}
        if len(fastest) < 2:
            return

        slowest = max(fastest, key=lambda index: fastest[index])
        others = median([value for index in fastest if index != slowest for value in seconds[index]])
        own = fastest[slowest]
        least_s = self._alarms.limit(name, "s") / of_a_turn
        wrong = own > self._alarms.limit(name, "times") * others and own - others > least_s
        found = (
            f"three in four turns of {role}.{slowest} took {own:.3g} s or more for a {unit}, half of the others' "
            f"{others:.3g} s at most, in {len(batches)} batches up to step {step}"
        )
        self._alarms.check(name, wrong, found)


def _keep(values: list[float], value: float) -> None:
    if len(values) < _MOST_TURNS:
        values.append(value)


def _quarter(values: list[float]) -> float:
    """What a quarter of them is below."""
    return sorted(values)[len(values) // 4]

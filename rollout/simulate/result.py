"""What one simulated run shows: step times, useful tokens per second, kept against issued, idle shares."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from msgspec import Struct, field

from rollout.broker.actions import EmitBatch
from rollout.broker.core import BrokerCore
from rollout.simulate.clock import Clock
from rollout.simulate.generator import SimulatedGenerator
from rollout.simulate.scenario import Scenario


class SimulationResult(Struct, frozen=True):
    """Means over the steps after the scenario's warm-up; seconds are virtual."""

    step_s: float
    useful_tokens_per_s: float
    kept_length: float
    """Mean tokens of a trained sample."""
    issued_length: float
    """Mean tokens that the issued episodes had or would have had."""
    population_length: float
    """Mean tokens of the work as drawn."""
    kept_turns: float
    issued_turns: float
    staleness: float
    generator_idle: float
    """Share of the generators' time without a running sequence."""
    learner_idle: float
    wasted: float
    """Share of the generated tokens that were not trained."""
    steps: int
    step_times: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    cpu_s: float = 0.0

    @property
    def kept_over_issued(self) -> float:
        return self.kept_length / self.issued_length


class Recorder:
    """Sums while a run goes on, and what they were at the end of the warm-up."""

    def __init__(self, scenario: Scenario, clock: Clock) -> None:
        self.times: list[float] = []
        """The time at which each version was published, in seconds."""
        self.batches: list[EmitBatch] = []
        self.issued_episodes = 0
        self.issued_tokens = 0
        self.issued_turns = 0
        self.peak_open = 0
        """Most episodes at once."""
        self.cancels = 0
        self.failures = 0

        self.server_deaths = 0
        self.machines_lost = 0
        self.train_s = 0.0

        self._scenario = scenario
        self._clock = clock
        self._dead: list[SimulatedGenerator] = []
        self._after_warm_up: dict[str, float] = {}

    def issued(self, lengths: list[int], open_episodes: int) -> None:
        """An episode whose turns would have so many tokens."""
        self.issued_episodes += 1
        self.issued_tokens += sum(lengths)
        self.issued_turns += len(lengths)
        self.peak_open = max(self.peak_open, open_episodes)

    def published(self, n: int, generators: list[SimulatedGenerator], tokens: int) -> None:
        """Version n; `tokens`: generated so far."""
        self.times.append(self._clock.now)
        if n == self._scenario.warm_up:
            self._after_warm_up = self._sums(generators, tokens)

    def retire(self, generator: SimulatedGenerator) -> None:
        """What a dead generator did still counts."""
        self._dead.append(generator)

    def _sums(self, generators: list[SimulatedGenerator], tokens: int) -> dict[str, float]:
        busy_s = sum(generator.busy_s for generator in [*self._dead, *generators])
        return {"busy": busy_s, "train": self.train_s, "tokens": tokens}

    def result(self, generators: list[SimulatedGenerator], broker: BrokerCore, cpu_s: float) -> SimulationResult:
        """`cpu_s`: CPU seconds of the whole simulation."""
        warm_up = self._scenario.warm_up
        report = broker.report()
        end = self._sums(generators, broker.ledger.generated)
        during = {name: end[name] - self._after_warm_up.get(name, 0.0) for name in end}

        batches = [batch for batch in self.batches if warm_up <= batch.step < len(self.times) - 1]
        kept = [sample.outcome for batch in batches for sample in batch.samples]
        staleness = sum(batch.step - each.outcome.version for batch in batches for each in batch.samples)
        tokens = sum(outcome.length for outcome in kept)
        count = len(kept)

        span = self.times[-1] - self.times[warm_up]

        return SimulationResult(
            step_s=span / len(batches),
            useful_tokens_per_s=tokens / span,
            kept_length=tokens / count,
            issued_length=self.issued_tokens / self.issued_episodes,
            population_length=self._scenario.work.population_length(),
            kept_turns=sum(outcome.turns for outcome in kept) / count,
            issued_turns=self.issued_turns / self.issued_episodes,
            staleness=staleness / count,
            generator_idle=1 - during["busy"] / (span * self._scenario.generators.count),
            learner_idle=1 - during["train"] / span,
            wasted=1 - report["useful_tokens"] / end["tokens"] if end["tokens"] else 0.0,
            steps=len(batches),
            step_times=[after - before for before, after in pairwise(self.times)],
            report=report,
            events=self._clock.events,
            cpu_s=cpu_s,
        )

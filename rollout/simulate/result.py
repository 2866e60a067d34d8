"""What one simulated run shows: step times, useful tokens per second, kept against issued, idle shares."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from msgspec import Struct, field

from rollout.broker import BrokerCore
from rollout.broker.actions import EmitBatch
from rollout.simulate.clock import Clock
from rollout.simulate.generator import SimulatedGenerator
from rollout.simulate.scenario import Scenario


class SimulationResult(Struct, frozen=True):
    """Means over the steps after the scenario's warm-up; seconds are virtual."""

    step_s: float
    useful_tokens_per_s: float
    samples_per_s: float
    kept_length: float
    """Mean tokens of a trained sample."""
    issued_length: float
    """Mean tokens that the issued episodes had or would have had."""
    population_length: float
    """Mean tokens of the work as drawn."""
    kept_turns: float
    issued_turns: float
    kept_success: float
    staleness: float
    generator_idle: float
    """Share of the generators' time without a running sequence."""
    generator_stalled: float
    """Share spent in weight loads."""
    learner_idle: float
    live_environments: float
    """Mean number of episodes inside an environment call."""
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

    def summary(self) -> dict[str, float]:
        """The figures alone, without lists, reports and what the simulation itself took."""
        names = [name for name in self.__struct_fields__ if name not in ("step_times", "report", "events", "cpu_s")]

        return {name: getattr(self, name) for name in names} | {"kept_over_issued": self.kept_over_issued}


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
        self._live_environments = 0
        self._environment_s = 0.0
        self._environments_since = 0.0
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

    def environments(self, change: int) -> None:
        """Note that so many more, or fewer, episodes are inside an environment call from now on."""
        now = self._clock.now
        self._environment_s += self._live_environments * (now - self._environments_since)
        self._live_environments += change
        self._environments_since = now

    def _sums(self, generators: list[SimulatedGenerator], tokens: int) -> dict[str, float]:
        self.environments(0)
        everybody = [*self._dead, *generators]

        return {
            "busy": sum(generator.busy_s for generator in everybody),
            "stalled": sum(generator.stalled_s for generator in everybody),
            "train": self.train_s,
            "environments": self._environment_s,
            "tokens": tokens,
        }

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
        machines = span * self._scenario.generators.count

        return SimulationResult(
            step_s=span / len(batches),
            useful_tokens_per_s=tokens / span,
            samples_per_s=count / span,
            kept_length=tokens / count,
            issued_length=self.issued_tokens / self.issued_episodes,
            population_length=self._scenario.work.population_length(),
            kept_turns=sum(outcome.turns for outcome in kept) / count,
            issued_turns=self.issued_turns / self.issued_episodes,
            kept_success=sum(outcome.success for outcome in kept) / count,
            staleness=staleness / count,
            generator_idle=1 - during["busy"] / machines,
            generator_stalled=during["stalled"] / machines,
            learner_idle=1 - during["train"] / span,
            live_environments=during["environments"] / span,
            wasted=1 - report["useful_tokens"] / end["tokens"] if end["tokens"] else 0.0,
            steps=len(batches),
            step_times=[after - before for before, after in pairwise(self.times)],
            report=report,
            events=self._clock.events,
            cpu_s=cpu_s,
        )

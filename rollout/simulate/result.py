"""What one simulated run shows: step times, useful tokens per second, kept against issued, idle shares."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field

from rollout.broker import BrokerCore
from rollout.broker.actions import EmitBatch
from rollout.simulate.engine import Generator
from rollout.simulate.setting import Setting


class Result(Struct, frozen=True):
    """Means over the steps after the setting's warm-up; seconds are virtual."""

    step_s: float
    useful_tokens_per_s: float
    samples_per_s: float
    kept_length: float  # mean tokens of a trained sample
    issued_length: float  # mean tokens that the issued episodes had or would have had
    population_length: float  # mean tokens of the work as drawn
    kept_turns: float
    issued_turns: float
    kept_success: float
    staleness: float
    generator_idle: float  # share of the generators' time without a running sequence
    generator_stalled: float  # share spent in weight loads
    learner_idle: float
    live_environments: float  # mean number of episodes inside an environment call
    wasted: float  # share of the generated tokens that were not trained
    steps: int
    step_times: list[float] = field(default_factory=list)
    report: dict[str, Any] = field(default_factory=dict)
    events: int = 0
    cpu_s: float = 0.0

    @property
    def kept_over_issued(self) -> float:
        return self.kept_length / self.issued_length

    def summary(self) -> dict[str, float]:
        names = [name for name in self.__struct_fields__ if name not in ("step_times", "report", "events", "cpu_s")]
        return {name: getattr(self, name) for name in names} | {"kept_over_issued": self.kept_over_issued}


class Recorder:
    """Sums while a run goes on; `mark` remembers them at the end of the warm-up."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.warm_up = setting.warm_up
        self.times: list[float] = []  # of the publication of each version
        self.batches: list[EmitBatch] = []
        self.issued_episodes = self.issued_tokens = self.issued_turns = 0
        self.cancels = self.failures = 0
        self.server_deaths = 0
        self.peak_open = 0  # episodes at once
        self.train_s = 0.0
        self._env_live, self._env_integral, self._env_since = 0, 0.0, 0.0
        self._retired = [0.0, 0.0, 0]  # busy seconds, stalled seconds, tokens of dead generators
        self._mark: dict[str, float] = {}

    def batch(self, now: float, batch: EmitBatch) -> None:
        self.batches.append(batch)

    def published(self, now: float, n: int, generators: list[Generator], tokens: int) -> None:
        self.times.append(now)
        if n == self.warm_up:
            self._mark = self._sums(now, generators, tokens)

    def retire(self, generator: Generator) -> None:
        for place, value in enumerate((generator.busy_s, generator.stalled_s, generator.tokens)):
            self._retired[place] += value

    def environments(self, now: float, change: int) -> None:
        self._env_integral += self._env_live * (now - self._env_since)
        self._env_live += change
        self._env_since = now

    def _sums(self, now: float, generators: list[Generator], tokens: int) -> dict[str, float]:
        self.environments(now, 0)
        return {
            "busy": self._retired[0] + sum(generator.busy_s for generator in generators),
            "stalled": self._retired[1] + sum(generator.stalled_s for generator in generators),
            "train": self.train_s,
            "environments": self._env_integral,
            "issued": self.issued_episodes,
            "issued_tokens": self.issued_tokens,
            "issued_turns": self.issued_turns,
            "spent": tokens,
        }

    def result(self, now: float, generators: list[Generator], broker: BrokerCore, events: int, cpu_s: float) -> Result:
        report = broker.report()
        end = self._sums(now, generators, broker.ledger.generated)
        during = {name: end[name] - self._mark.get(name, 0.0) for name in end}
        begin = self.times[self.warm_up]
        span = self.times[-1] - begin
        batches = [batch for batch in self.batches if self.warm_up <= batch.step < len(self.times) - 1]
        samples = [sample for batch in batches for sample in batch.samples]
        kept = [sample.outcome for sample in samples]
        stale = sum(b.step - s.outcome.first_version for b in batches for s in b.samples)
        tokens, count = sum(outcome.length for outcome in kept), len(kept)
        spent_in_all, trained_in_all = end["spent"], report["useful_tokens"]
        machines = span * self.setting.engine.count
        return Result(
            step_s=span / len(batches),
            useful_tokens_per_s=tokens / span,
            samples_per_s=count / span,
            kept_length=tokens / count,
            issued_length=end["issued_tokens"] / end["issued"],
            population_length=self.setting.work.population_length(),
            kept_turns=sum(outcome.turns for outcome in kept) / count,
            issued_turns=end["issued_turns"] / end["issued"],
            kept_success=sum(outcome.success for outcome in kept) / count,
            staleness=stale / count,
            generator_idle=1 - during["busy"] / machines,
            generator_stalled=during["stalled"] / machines,
            learner_idle=1 - during["train"] / span,
            live_environments=during["environments"] / span,
            wasted=1 - trained_in_all / spent_in_all if spent_in_all else 0.0,
            steps=len(batches),
            step_times=[b - a for a, b in zip(self.times, self.times[1:], strict=False)],
            report=report,
            events=events,
            cpu_s=cpu_s,
        )

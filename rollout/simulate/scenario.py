"""What is simulated, as plain data: the machine, the work, the learner; and the broker's own rules beside them."""

from __future__ import annotations

import math
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from rl.config.schema import GeneratorConfig
from rl.config.seeds import sample_seed
from rollout.broker.actions import EmitBatch
from rollout.broker.rules import Rules
from rollout.generator.engines.timing import SimulatedOptions
from rollout.simulate.distributions import Constant, Distribution, normal, uniform

_DEFAULTS = GeneratorConfig()


class Generators(Struct, frozen=True):
    """`count` equal ones. A decode step of n sequences takes decode_base_s + decode_per_seq_s * (n - 1)."""

    count: int
    max_num_seqs: int = _DEFAULTS.max_num_seqs
    max_model_len: int = 40_960
    kv_tokens: int = 0
    """KV memory; 0: every sequence has room for a whole context, so that KV memory never binds."""
    kv_admission: Literal["expected", "whole"] = "expected"
    """What a request reserves of it: prompt and mean response, or prompt and the longest one."""
    decode_base_s: float = 0.02
    decode_per_seq_s: float = 0.0
    prefill_tokens_per_s: float = SimulatedOptions().prefill_tokens_per_s
    copy_s: float = 0.0
    """The seconds of a weight update while decoding goes on."""
    load_s: float = 0.0
    """The seconds of a weight update while nothing is decoded."""
    on_update: Literal["recompute", "keep"] = "recompute"
    rolling: bool = True
    """One generator after the other is updated; False: all at once, as with alpha = 0."""
    alternate: bool = False
    """They rest while the learner trains."""
    mtbf_s: float = 0.0
    """Mean time between deaths of one generator; 0: none dies."""
    restart_s: float = 60.0

    @property
    def capacity(self) -> int:
        """Tokens of context that one generator holds."""
        return self.kv_tokens or self.max_num_seqs * self.max_model_len

    def timing(self) -> SimulatedOptions:
        """The timing as the simulated engine reads it."""
        return SimulatedOptions(
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_base_s=self.decode_base_s,
            decode_per_seq_s=self.decode_per_seq_s,
        )


class Work(Struct, frozen=True):
    """Episodes. The logarithm of a response's length is shared within its task in the proportion `task_share`."""

    length: Distribution
    """Tokens of one turn."""
    task_share: float = 0.0
    """The share of the variance of z that the samples of a task have in common."""
    max_tokens: int = 32_768
    """The most tokens of one turn."""
    turns: Distribution = Constant(1)
    prompt_tokens: int = 512
    observation_tokens: int = 0
    reset_s: Distribution = Constant(0)
    step_s: Distribution = Constant(0)
    """Environment and reward, after each turn."""
    hang_probability: float = 0.0
    """The probability of a step that never answers."""
    fail_probability: float = 0.0
    """The probability of a step that raises."""
    step_deadline_s: float = 600.0
    success: float = 0.5
    """Mean chance of reward 1."""
    success_spread: float = 0.0
    """Standard deviation of a task's log-odds: it says how many groups are constant."""

    def lengths(self, task: int, seed: int) -> list[int]:
        """Tokens of each turn of one sample: a function of its task and seed alone."""
        shared = self.task_share**0.5
        own = (1 - self.task_share) ** 0.5
        common = shared * normal(task * 7919 + 17, 0) if shared else 0.0
        turns = max(1, round(self.turns.at(normal(seed, 0))))

        return [
            max(1, min(self.max_tokens, round(self.length.at(common + own * normal(seed, 2 + turn)))))
            for turn in range(turns)
        ]

    def reward(self, task: int, seed: int) -> float:
        """The reward, 1 or 0; the chance of 1 is its task's."""
        odds = math.log(self.success / (1 - self.success)) if 0 < self.success < 1 else 50.0 * (self.success - 0.5)
        odds += self.success_spread * normal(task * 104_729 + 5, 1)

        return float(uniform(seed, 1) < 1 / (1 + math.exp(-odds)))

    def population_length(self, tasks: int = 4096) -> float:
        """Mean tokens of an episode as drawn, whatever becomes of it."""
        return sum(sum(self.lengths(task, sample_seed(1, task))) for task in range(tasks)) / tasks


class EnvServers(Struct, frozen=True):
    """Environment servers; episodes at once = count * capacity."""

    count: int = 4
    capacity: int = 100_000
    slow_fraction: float = 0.0
    """Share of the servers whose steps take `slow_factor` times as long (fail-slow)."""
    slow_factor: float = 1.0
    mtbf_s: float = 0.0
    """Mean time between deaths of one server, with all its episodes (correlated failure); 0: none dies."""
    restart_s: float = 30.0


class Machines(Struct, frozen=True):
    """Generators and environment servers stand on them, in equal parts; who is lost takes its own along."""

    count: int = 1
    mtbf_s: float = 0.0
    """Mean time between losses of one machine; 0: none is lost."""
    restart_s: float = 120.0
    """Until what stood on it starts again, there or on another one."""

    def of(self, index: int, count: int) -> int:
        """The machine of one of `count` processes."""
        return index * self.count // count


class TrainingCost(Struct, frozen=True):
    """A step takes step_s + per_sample_s * samples + per_token_s * trained tokens; then the weights are published."""

    step_s: float = 0.0
    per_sample_s: float = 0.0
    per_token_s: float = 0.0
    publish_s: float = 0.0

    def seconds(self, batch: EmitBatch) -> float:
        """The seconds of one step, without the publication."""
        tokens = sum(sample.outcome.length for sample in batch.samples)

        return self.step_s + self.per_sample_s * len(batch.samples) + self.per_token_s * tokens


class Scenario(Struct, frozen=True):
    """One run; the baselines (barriers, pinned prompts) are hooks that the broker's section names."""

    broker: Rules
    generators: Generators
    work: Work
    servers: EnvServers = EnvServers()
    machines: Machines = Machines()
    training: TrainingCost = TrainingCost()
    cancellation: bool = True
    """If this is False, cancelled episodes go on to their end, as in the published implementation."""
    hop_s: float = 0.0
    """The seconds of one message between an environment server and a generator."""
    status_s: float = 0.0
    """Period of the generators' statuses; 0: only after weight loads."""
    seed: int = 0
    measured: int = 0
    """Versions after the warm-up that are simulated, in steady state; 0: all of the broker's steps."""

    @property
    def warm_up(self) -> int:
        """Versions that are not measured: until the buffer is full of staggered work."""
        return min(3 + 2 * self.broker.staleness_bound, self.broker.steps - 1) if self.measured else 0

    @property
    def until(self) -> int:
        """The version at which the simulation ends: before the broker winds down, if it has so many steps."""
        return min(self.broker.steps, self.warm_up + self.measured) if self.measured else self.broker.steps

    def with_broker(self, **changes: object) -> Scenario:
        return replace(self, broker=self.broker.changed(**changes))

    def with_generators(self, **changes: object) -> Scenario:
        return replace(self, generators=replace(self.generators, **changes))

    def with_work(self, **changes: object) -> Scenario:
        return replace(self, work=replace(self.work, **changes))

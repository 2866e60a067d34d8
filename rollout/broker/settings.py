"""What the core needs to know of a run's configuration."""

from __future__ import annotations

import math
from typing import Any, Literal

from msgspec import Struct

from rl.core.config import Config


class Settings(Struct, frozen=True):
    steps: int  # the version at which the run ends
    groups_per_batch: int  # B
    group_size: int  # G
    train_tasks: int
    alpha: float = 1.0
    redundant_groups: int = 0  # R
    redundant_episodes: int = 0  # g
    hold_patience: float = 1.0  # P
    hold_deadline_s: float = 120.0
    max_attempts: int = 3
    episode_deadline_s: float = 600.0
    filter_constant_groups: bool = False
    max_filtered_per_step: int = 64
    surplus: Literal["keep", "cancel"] = "keep"
    hedge_quantile: float = 0.0
    quarantine_failures: int = 0
    quarantine_s: float = 30.0
    priority: str = "oldest"
    curriculum: str = "shuffled"
    curriculum_options: dict[str, Any] = {}
    batch_barrier: bool = False
    seed: int = 0
    temperature: float = 1.0
    eval_tasks: int = 0  # more than 0: the end waits for the evaluation of the last version
    eval_temperature: float = 0.0
    drain_deadline_s: float = 20.0  # longest wait, at the end, for cancelled tickets and late usage
    max_groups_given_up: int = 64  # in a row, without any episode finishing: the run stops

    @classmethod
    def of(cls, config: Config, train_tasks: int, start_step: int = 0) -> Settings:
        rollout = config.rollout
        return cls(
            steps=start_step + config.steps,
            groups_per_batch=rollout.groups_per_batch,
            group_size=rollout.group_size,
            train_tasks=train_tasks,
            alpha=rollout.alpha,
            redundant_groups=rollout.redundant_groups,
            redundant_episodes=rollout.redundant_episodes,
            hold_patience=rollout.hold_patience,
            hold_deadline_s=rollout.hold_deadline_s,
            max_attempts=rollout.max_attempts,
            episode_deadline_s=rollout.episode_deadline_s,
            filter_constant_groups=rollout.filter_constant_groups,
            max_filtered_per_step=rollout.max_filtered_per_step,
            surplus=rollout.surplus,
            hedge_quantile=rollout.hedge_quantile,
            quarantine_failures=rollout.quarantine_failures,
            quarantine_s=rollout.quarantine_s,
            priority=rollout.priority,
            curriculum=rollout.curriculum,
            curriculum_options=rollout.curriculum_options,
            batch_barrier=rollout.batch_barrier,
            seed=config.seed,
            temperature=config.sampling.temperature,
            eval_tasks=config.eval.tasks,
            eval_temperature=config.eval.temperature,
        )

    @property
    def staleness_bound(self) -> int:
        """S = ceil(alpha)."""
        return math.ceil(self.alpha)

    @property
    def members(self) -> int:
        """G + g: tickets of one group; sample_id = group_id * members + member."""
        return self.group_size + self.redundant_episodes

    def admitted(self, trained: int) -> int:
        """F1: groups that may be queued, running, waiting or batched but untrained at once."""
        remaining = (self.steps - trained) * self.groups_per_batch
        return min(math.floor((1 + self.alpha) * self.groups_per_batch), remaining) + self.redundant_groups

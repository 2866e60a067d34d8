"""The rules of one run in numbers: the section `rollout` of its configuration, and the few others the core needs."""

from __future__ import annotations

import math
from fractions import Fraction

from rl.config.rollout import RolloutConfig
from rl.config.schema import Config

_DEFAULTS = Config()


class Rules(RolloutConfig):
    """Every field of `rollout` with its own default; B, G, R, g, P and S are explained there."""

    steps: int
    """The version at which the run ends, unless `seconds` of training are over before."""
    seconds: float | None = _DEFAULTS.seconds
    train_tasks: int
    """Tasks of the training split."""
    seed: int = _DEFAULTS.seed
    temperature: float = _DEFAULTS.sampling.temperature
    eval_tasks: int = _DEFAULTS.eval.tasks
    """If this is more than 0, the end waits for the evaluation of the last version."""
    eval_temperature: float = _DEFAULTS.eval.temperature
    eval_samples: int = _DEFAULTS.eval.samples
    hold_deadline_s: float = 120.0  # longest time that a batch is held open
    drain_deadline_s: float = 20.0
    """Longest wait, at the end, for cancelled tickets and late usage."""
    max_groups_given_up: int = 64
    """So many groups given up in a row, without any episode finishing, stop the run."""

    @classmethod
    def of(cls, config: Config, train_tasks: int, start_step: int = 0) -> Rules:
        return cls(
            **config.rollout.model_dump(),
            steps=max(start_step, config.steps),
            train_tasks=train_tasks,
            **config.model_dump(include={"seed", "seconds"}),
            temperature=config.sampling.temperature,
            **{f"eval_{name}": getattr(config.eval, name) for name in ("tasks", "temperature", "samples")},
        )

    def changed(self, **changes: object) -> Rules:
        """These rules with other values in some fields. Raises ValidationError for a value that is not allowed."""
        return Rules.model_validate(self.model_dump() | changes)

    @property
    def members(self) -> int:
        """G + g: tickets of one group; sample_id = group_id * members + member."""
        return self.group_size + self.redundant_episodes

    def admitted(self, trained: int) -> int:
        """F1: groups that may be queued, running, waiting or batched but untrained at once."""
        remaining = (self.steps - trained) * self.groups_per_batch
        exact = Fraction(str(self.alpha)) * self.groups_per_batch  # as written: 0.4 * 45 is 18, not 17.999…
        return min(self.groups_per_batch + math.floor(exact), remaining) + self.redundant_groups

"""The section `rollout`: batches, freshness, redundancy, and the order of work."""

from __future__ import annotations

import math
from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from rl.config.section import Named, Section, Where, split_named


class RolloutConfig(Section):
    where = "broker"
    groups_per_batch: int = Field(16, ge=1)
    """B: whole groups in one training batch; N = B * group_size samples."""
    group_size: int = Field(8, ge=1)
    """G: episodes of one task that form a group."""
    alpha: float = Field(1.0, ge=0)
    """Asynchronous ratio: at most floor((1 + alpha) * B) + R groups are open at once, so staleness <= ceil(alpha)."""
    max_staleness: int | None = Field(None, ge=0)
    """S, for answers that take longer than ceil(alpha) steps; no more groups are open for it; null: ceil(alpha)."""
    redundant_groups: int = Field(0, ge=0)
    """R: groups in flight beyond what admission allows."""
    redundant_episodes: int = Field(0, ge=0)
    """g: extra episodes per group; the first group_size to finish win, the rest are cancelled."""
    hold_patience: float = Field(1, ge=0, allow_inf_nan=True)
    """P: a batch waits for a group that would expire once it has expired P times; .inf: it never waits."""
    max_attempts: int = Field(3, ge=1)
    """Attempts at one sample before its group is given up; each ends by a lost worker, an error or a deadline."""
    episode_deadline_s: float = Field(600.0, gt=0)
    """An episode running longer than this is cancelled and tried again."""
    filter_constant_groups: bool = False
    """Drop groups whose rewards are all equal (dynamic filtering) and start replacements."""
    first_episodes: Annotated[int, Where("filter_constant_groups")] = Field(0, ge=0)
    """Episodes of a group that begin first, the others only if the rewards of these differ; 0: all begin at once."""
    max_filtered_per_step: Annotated[int, Where("filter_constant_groups")] = Field(64, ge=0)
    """Constant groups dropped per step; further ones are kept, so that a batch always has B whole groups."""
    priority: str = "oldest"
    """Order of issue and of consumption: `oldest`, `freshest`, or `package.module:Name`
    (rollout/broker/tasks.py)."""
    curriculum: Named = "shuffled"
    """Order of tasks: `shuffled`, `success` (weighted by past success), or `package.module:Name`
    (rollout/broker/tasks.py), or with options as `{name: {option: value}}`; its state is saved with checkpoints."""
    hooks: Annotated[list[Named], Where("broker, proxy, environment servers")] = Field(default_factory=list)
    """What is done beside the rules (docs/hooks.md), each by its name, or with options as `{name: {option: value}}`."""

    @property
    def staleness_bound(self) -> int:
        """S: ceil(alpha), which admission alone keeps (docs/freshness.md derives it), or what was allowed beyond."""
        return math.ceil(self.alpha) if self.max_staleness is None else self.max_staleness

    @field_validator("hooks")
    @classmethod
    def _hooks_are_others(cls, hooks: list[Named]) -> list[Named]:
        names = [split_named(each)[0] for each in hooks]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"{twice[0]!r} is named twice; name it once")
        return hooks

    @model_validator(mode="after")
    def _holds_what_is_open(self) -> Self:
        least = math.ceil(self.alpha)
        if self.max_staleness is not None and self.max_staleness < least:
            raise ValueError(
                f"rollout.max_staleness={self.max_staleness} is below {least}, which rollout.alpha={self.alpha:g} "
                "needs: what may be open would expire; lower rollout.alpha, or leave max_staleness out"
            )
        return self

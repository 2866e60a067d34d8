"""Several environments in one run, each with its own weight, options, limits, metrics and held-out tasks.

    env:
      name: mixture
      max_turns: 12
      options:
        members:
          sums: {env: math, weight: 2, max_turns: 1, max_tokens: 24}
          lake: {env: gymnasium, options: {id: FrozenLake-v1}, max_tokens: 8}

One pass over the data has as many tasks of each member as its weight says, in the order that the run's curriculum
gives. Held-out tasks of the members alternate, so that `eval.tasks` may be any number. The metrics of a member stand
under its name: `rollout/lake/reward`, `eval/lake/accuracy`, `env/lake/invalid_share`.
"""

from __future__ import annotations

import asyncio
import math
import random
from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import accumulate, zip_longest
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from envs.audit.auditor import Audited, Change
from envs.registry import load_family, made
from rl.config.plugins import validated
from rl.config.tree import ConfigError
from rollout.episodes.environment import (
    ChatMessage,
    Environment,
    EnvironmentFamily,
    EpisodeTerms,
    FinishedOnDemand,
    Needs,
    Solvable,
    Step,
)

MOST_TASKS = 1_000_000  # of one pass, where they are not given
ROUNDING = 1e-6


class MemberOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    env: str
    """A registered environment or `package.module:Name`, as in `env.name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """The same as `env.options` of that environment."""
    weight: float = Field(1.0, gt=0)
    """Share of the training tasks, against the weights of the others."""
    max_turns: int | None = Field(None, ge=1)
    """Turns of its episodes, at most `env.max_turns`; None: that."""
    max_tokens: int | None = Field(None, ge=1)
    """Tokens of its turns, at most `sampling.max_tokens`; None: that."""
    eval_tasks: int | None = Field(None, ge=0)
    """Held-out tasks that it brings to the mixture, the first ones; None: all that it has."""
    eval_temperature: float | None = Field(None, ge=0)
    """The temperature of its evaluations; None: `eval.temperature`. Training has one temperature: the learner divides
    by it."""


class MixtureOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    members: dict[str, MemberOptions] = Field(min_length=1)
    """The environments by a name of their own, under which their metrics stand."""
    tasks: int | None = Field(None, ge=1)
    """Training tasks of one pass; None: so many that every task of every member occurs. A member whose share is larger
    than its number of tasks plays them again."""

    @field_validator("members")
    @classmethod
    def _names_are_words(cls, members: dict[str, MemberOptions]) -> dict[str, MemberOptions]:
        for name, member in members.items():
            if not name or len(name) > 40 or not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"{name!r} is no name for metrics: letters, digits, - and _ only")
            if member.env == "mixture":
                raise ValueError(f"{name!r} is a mixture itself: name its members here")
        return members


@dataclass(frozen=True)
class MixtureTask:
    label: str
    task: Any

    @property
    def task_type(self) -> str:
        """A row of its own in the tables of `fresco eval`."""
        return self.label


@dataclass(frozen=True)
class Member:
    family: EnvironmentFamily
    terms: EpisodeTerms


class MixtureFamily:
    Options: type[BaseModel] = MixtureOptions

    def __init__(self, options: MixtureOptions, seed: int) -> None:
        """Raises ConfigError for options of a member that cannot be used."""
        self.options = options
        self.members: dict[str, Member] = {}
        for name, member in options.members.items():
            self.members[name] = member_of(name, member, seed, _where(name))

        offered = [each.family.audit_s for each in self.members.values() if isinstance(each.family, Audited)]
        self.audit_s = max(offered, default=0.0)

        sizes = {name: member.family.task_count("train") for name, member in self.members.items()}
        counts = shares(sizes, {name: each.weight for name, each in options.members.items()}, options.tasks)
        self.shares = counts  # of one pass
        self._names = list(counts)
        self._ends = list(accumulate(counts.values()))
        self._held_out = alternating(
            {
                name: eval_count(member.family.task_count("eval"), options.members[name])
                for name, member in self.members.items()
            }
        )

    @property
    def tools(self) -> bool:
        """Whether the episodes of a member may begin with tools."""
        return any(getattr(member.family, "tools", False) for member in self.members.values())

    @classmethod
    def needs(cls, options: MixtureOptions) -> Needs:
        """Raises ConfigError for a member that does not fit by itself."""
        needs = []
        tokens = 1
        for name, member in options.members.items():
            kind = load_family(member.env)
            if getattr(kind, "foreign", False):
                where = f"env.options.members.{name}.env={member.env!r}"
                raise ConfigError(
                    f"{where}: its agent owns the loop, and members play reset and step; run it by itself"
                )

            own = _options(name, member)
            need = kind.needs(own) if hasattr(kind, "needs") else Needs(0.0, "no step takes long")
            if member.max_turns is not None and member.max_turns < need.turns:
                where = f"env.options.members.{name}.max_turns={member.max_turns}"
                raise ConfigError(f"{where}: no task of env {member.env!r} is solved in fewer than {need.turns} turns")

            turns = member.max_turns or need.turns
            tokens = max(tokens, member.max_tokens or 1)
            needs.append(Needs(need.step_s, f"{name}: {need.why}", turns, need.episodes, f"{name}: {need.room}"))

        slowest = max(needs, key=lambda need: need.step_s)
        narrow = [need for need in needs if need.episodes is not None]
        fewest = min(narrow, key=lambda need: need.episodes or 0, default=slowest)
        longest = max(need.turns for need in needs)
        return Needs(slowest.step_s, slowest.why, longest, fewest.episodes, fewest.room, tokens)

    @classmethod
    def planned(cls, options: MixtureOptions) -> dict[str, int]:
        """A member that cannot say it is made for it."""
        planned: dict[str, dict[str, int]] = {}
        for name, member in options.members.items():
            kind = load_family(member.env)
            own = _options(name, member)
            counts = kind.planned(own) if hasattr(kind, "planned") else None
            if counts is None:
                family = made(f"{name}: {member.env}", kind, own, 0)
                counts = {split: family.task_count(split) for split in ("train", "eval")}
            planned[name] = counts

        sizes = {name: counts["train"] for name, counts in planned.items()}
        weights = {name: member.weight for name, member in options.members.items()}
        held_out = [eval_count(counts["eval"], options.members[name]) for name, counts in planned.items()]
        return {"train": sum(shares(sizes, weights, options.tasks).values()), "eval": sum(held_out)}

    def task_count(self, split: str) -> int:
        return self._ends[-1] if split == "train" else len(self._held_out)

    def task(self, split: str, index: int) -> MixtureTask:
        if split == "train":
            if not 0 <= index < self._ends[-1]:
                raise IndexError(f"train task {index} of {self._ends[-1]}")
            place = bisect_right(self._ends, index)
            name = self._names[place]
            index -= self._ends[place - 1] if place else 0
        else:
            name, index = self._held_out[index]

        family = self.members[name].family
        return MixtureTask(name, family.task(split, index % family.task_count(split)))

    async def start(self) -> None:
        await asyncio.gather(*(member.family.start() for member in self.members.values()))

    async def changes(self, task: MixtureTask, response: str, dice: random.Random) -> list[Change]:
        """What the task's member offers."""
        family = self.members[task.label].family
        if not isinstance(family, Audited):
            return []
        made = await family.changes(task.task, response, dice)
        return [replace(change, task=MixtureTask(task.label, change.task)) for change in made]

    async def judged(self, change: Change) -> bool:
        family = self.members[change.task.label].family
        return isinstance(family, Audited) and await family.judged(replace(change, task=change.task.task))

    def make(self) -> MixtureEnvironment:
        return MixtureEnvironment(self)

    async def stop(self) -> None:
        await asyncio.gather(*(member.family.stop() for member in self.members.values()))


class MixtureEnvironment:
    """An episode of the member that its task belongs to."""

    def __init__(self, family: MixtureFamily) -> None:
        self._members = family.members
        self._inner: Environment | None = None
        self._success = False
        self.terms = EpisodeTerms()

    @property
    def inner(self) -> Environment:
        assert self._inner is not None, "reset() comes first"
        return self._inner

    async def reset(self, task: MixtureTask) -> list[ChatMessage]:
        member = self._members[task.label]
        self.terms = member.terms
        self._inner = member.family.make()
        return await self._inner.reset(task.task)

    async def step(self, action: str, truncated: bool = False) -> Step:
        return self._labelled(await self.inner.step(action, truncated))

    async def finish(self) -> Step:
        """The member's verdict; that of its last step, where it has none on demand."""
        if isinstance(self._inner, FinishedOnDemand):
            return self._labelled(await self._inner.finish())
        return Step([], None, True, self._success)

    async def gold(self) -> str | None:
        return await self._inner.gold() if isinstance(self._inner, Solvable) else None

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()

    def _labelled(self, step: Step) -> Step:
        """Two members may count different things under one name."""
        self._success = step.success
        if not self.terms.label:
            return step
        info = {f"{self.terms.label}/{name}": value for name, value in step.info.items()}
        return replace(step, info=info)


def shares(sizes: dict[str, int], weights: dict[str, float], total: int | None) -> dict[str, int]:
    """How many tasks of one pass are each member's, at least one: in proportion to the weights, rounded up.

    total None: the fewest with which each member's share is all of its tasks, and about MOST_TASKS at most.
    """
    whole = sum(weights.values())
    needed = max(sizes[name] / weight for name, weight in weights.items())
    scale = min(needed, MOST_TASKS / whole) if total is None else total / whole
    return {name: math.ceil(weight * scale - ROUNDING) for name, weight in weights.items()}


def alternating(counts: dict[str, int]) -> list[tuple[str, int]]:
    """(member, index) of all held-out tasks, one of each member in turn for as long as it has any."""
    columns = [[(name, index) for index in range(count)] for name, count in counts.items()]
    return [entry for row in zip_longest(*columns) for entry in row if entry is not None]


def member_of(name: str, options: MemberOptions, seed: int, where: str) -> Member:
    """where: the field that has its options. Raises ConfigError for options that cannot be used."""
    kind = load_family(options.env)
    family = made(f"{options.env} ({where})", kind, validated(kind.Options, options.options, where), seed)
    return Member(family, EpisodeTerms(name, options.max_turns, options.max_tokens, options.eval_temperature))


def _where(name: str) -> str:
    return f"env.options.members.{name}.options"


def _options(name: str, member: MemberOptions) -> Any:
    return validated(load_family(member.env).Options, member.options, _where(name))


def eval_count(there: int, member: MemberOptions) -> int:
    return there if member.eval_tasks is None else min(there, member.eval_tasks)

"""Several held-out sets in one run, by name: `eval.sets`.

Each set is the run's environment with other options, most often another `eval_source`, and its held-out tasks. In a
mixture a set is written like a member. Sets alternate with the run's own tasks, which are called `own`, or by their
member; the metrics are `eval/<name>/accuracy`. What is trained stays as it is without them.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from envs.audit.auditor import Audited
from envs.mixture import Member, MemberOptions, MixtureFamily, MixtureTask, alternating, eval_count, member_of
from rl.config.plugins import validated
from rl.config.schema import Config, ConfigError
from rollout.episodes.environment import Endpoint, EnvironmentFamily, EpisodeTerms, ForeignLoop, Outcome

OWN = "own"
_TRAINED = ""


class HeldOutSets(MixtureFamily):
    """counts: the held-out tasks of each set."""

    def __init__(self, own: EnvironmentFamily, sets: dict[str, Member], counts: dict[str, int]) -> None:
        self.own = own
        self.tools = getattr(own, "tools", False)
        self.foreign = getattr(own, "foreign", False)
        self.audit_s = own.audit_s if isinstance(own, Audited) else 0.0

        plain = {_TRAINED: Member(own, EpisodeTerms()), OWN: Member(own, EpisodeTerms(OWN))}
        self.members = (own.members if isinstance(own, MixtureFamily) else plain) | sets
        self._held_out = alternating({_TRAINED: own.task_count("eval"), **counts})

    def task_count(self, split: str) -> int:
        return self.own.task_count(split) if split == "train" else len(self._held_out)

    def task(self, split: str, index: int) -> MixtureTask:
        name, index = (_TRAINED, index) if split == "train" else self._held_out[index]
        if name != _TRAINED:
            return MixtureTask(name, self.members[name].family.task(split, index))
        task = self.own.task(split, index)
        return task if isinstance(task, MixtureTask) else MixtureTask(_TRAINED if split == "train" else OWN, task)

    def make(self) -> Any:
        return _LabelledLoop(self) if self.foreign else super().make()

    async def start(self) -> None:
        await asyncio.gather(*(family.start() for family in self._families()))

    async def stop(self) -> None:
        await asyncio.gather(*(family.stop() for family in self._families()))

    def _families(self) -> list[EnvironmentFamily]:
        return list({id(member.family): member.family for member in self.members.values()}.values())


class _LabelledLoop:
    """An episode of an agent that owns its loop, in the set that its task belongs to."""

    def __init__(self, family: HeldOutSets) -> None:
        self._members = family.members
        self._inner: ForeignLoop | None = None
        self.terms = EpisodeTerms()

    async def run(self, task: MixtureTask, endpoint: Endpoint) -> Outcome:
        member = self._members[task.label]
        self.terms = member.terms
        inner: Any = member.family.make()
        self._inner = inner
        outcome: Outcome = await inner.run(task.task, endpoint)
        where = f"{task.label}/" if task.label else ""
        return replace(outcome, info={where + name: value for name, value in outcome.info.items()})

    async def close(self) -> None:
        if self._inner is not None:
            await self._inner.close()


def with_sets(config: Config, own: EnvironmentFamily) -> HeldOutSets:
    """Raises ConfigError for a set that cannot be used."""
    taken = own.members if isinstance(own, MixtureFamily) else {OWN: own}
    sets = {}
    counts = {}

    for name, change in config.eval.sets.items():
        where = f"eval.sets.{name}"
        if name in taken:
            raise ConfigError(f"{where}: so are the run's own held-out tasks called; choose another name")
        options = _options(config, own, where, change)
        inner = f"{where}.options" if isinstance(own, MixtureFamily) else where
        sets[name] = member_of(name, options, config.seed, inner)
        counts[name] = eval_count(sets[name].family.task_count("eval"), options)
    return HeldOutSets(own, sets, counts)


def _options(config: Config, own: EnvironmentFamily, where: str, change: str | dict[str, Any]) -> MemberOptions:
    if not isinstance(own, MixtureFamily):
        changes: dict[str, Any] = {"eval_source": change} if isinstance(change, str) else change
        return MemberOptions(env=config.env.name, options=config.env.options | changes)
    if isinstance(change, str):
        such = f"{{env: math, options: {{eval_source: {change}}}}}"
        raise ConfigError(f"{where}={change!r}: in a mixture a set is written like a member, such as {such}")
    member_options: MemberOptions = validated(MemberOptions, change, where)
    return member_options

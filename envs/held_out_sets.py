"""Several held-out sets in one run, by name: `eval.sets`.

Each set is the run's environment with other options, most often another `eval_source`, and its held-out tasks. They
alternate with the run's own ones, which are called `own`; the metrics are `eval/<name>/accuracy`. What is trained stays
as it is without them.
"""

from __future__ import annotations

import asyncio
from typing import Any

from envs.audit.auditor import Audited
from envs.mixture import Member, MixtureFamily, MixtureTask, alternating
from envs.registry import load_family, made
from rl.config.plugins import validated
from rl.config.schema import Config, ConfigError
from rollout.episodes.environment import EnvironmentFamily, EpisodeTerms

OWN = "own"
_TRAINED = ""


class HeldOutSets(MixtureFamily):
    def __init__(self, own: EnvironmentFamily, sets: dict[str, EnvironmentFamily]) -> None:
        self.own = own
        evaluated = {OWN: own, **sets}
        self.members = {_TRAINED: Member(own, EpisodeTerms())}
        self.members |= {name: Member(family, EpisodeTerms(name)) for name, family in evaluated.items()}
        self.audit_s = own.audit_s if isinstance(own, Audited) else 0.0
        self._held_out = alternating({name: family.task_count("eval") for name, family in evaluated.items()})

    def task_count(self, split: str) -> int:
        return self.own.task_count(split) if split == "train" else len(self._held_out)

    def task(self, split: str, index: int) -> MixtureTask:
        if split == "train":
            return MixtureTask(_TRAINED, self.own.task(split, index))
        name, index = self._held_out[index]
        return MixtureTask(name, self.members[name].family.task(split, index))

    async def start(self) -> None:
        await asyncio.gather(*(family.start() for family in self._families()))

    async def stop(self) -> None:
        await asyncio.gather(*(family.stop() for family in self._families()))

    def _families(self) -> list[EnvironmentFamily]:
        return [member.family for name, member in self.members.items() if name != OWN]


def with_sets(config: Config, own: EnvironmentFamily) -> HeldOutSets:
    """Raises ConfigError for a set that cannot be used."""
    kind = load_family(config.env.name)
    if isinstance(own, MixtureFamily) or getattr(own, "tools", False) or getattr(own, "foreign", False):
        raise ConfigError(
            f"eval.sets: env {config.env.name!r} has members, tools or a loop of its own, and takes no further sets; "
            "leave them out, and use `fresco eval --data` for each"
        )

    sets = {}
    for name, change in config.eval.sets.items():
        if name == OWN:
            raise ConfigError(f"eval.sets.{OWN}: so are the run's own held-out tasks called; choose another name")
        changes: dict[str, Any] = {"eval_source": change} if isinstance(change, str) else change
        where = f"eval.sets.{name}"
        options = validated(kind.Options, config.env.options | changes, where)
        sets[name] = made(f"{config.env.name} ({where})", kind, options, config.seed)
    return HeldOutSets(own, sets)

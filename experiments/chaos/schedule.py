"""Which fault meets which process at which step: drawn from a seed before the run begins."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from rl.config.schema import Config

Kind = Literal["kill", "raise", "stop", "pause", "child", "cut", "disk"]
KINDS: dict[Kind, str] = {
    "kill": "SIGKILL",
    "raise": "an exception, wherever its main thread is",
    "stop": "SIGSTOP, for good: the supervisor has to find it",
    "pause": "SIGSTOP, then SIGCONT after a second",
    "child": "SIGKILL of a grandchild: an engine's process, a worker of an environment server",
    "cut": "a connection between two processes is shut down: what was on its way is lost",
    "disk": "the file system of the run is full for a second, and the run has to end in order",
}
MODULES = {
    "generator": "rollout.generator.process",
    "env_server": "envs.server",
    "proxy": "rollout.proxy.process",
    "broker": "rollout.broker.process",
    "learner": "rl.learner.",
    "parsers": "rollout.parsers.process",
}
"""Role -> module on its processes' command lines. The supervisor is no target: with it the run is asked to end."""
EVERYWHERE = tuple(role for role in MODULES if role != "parsers")
"""The roles that every run has."""


@dataclass(frozen=True)
class Fault:
    """A fault at `step`, or as soon after it as it finds a process of `role`; `draw` in [0, 1) chooses among those."""

    step: float
    kind: Kind
    role: str
    draw: float


def roles_of(config: Config) -> Sequence[str]:
    """The roles of such a run."""
    return tuple(MODULES) if config.chat.vllm_names else EVERYWHERE


def make_schedule(
    seed: int,
    faults: int,
    steps: int,
    kinds: Sequence[Kind] = get_args(Kind),
    roles: Sequence[str] = EVERYWHERE,
) -> list[Fault]:
    """`faults` of these kinds, in order, between the first and the last but one of `steps`.

    Each kind comes about equally often, and so does each role among those that a kind can meet.
    """
    chance = random.Random(seed)
    places = sorted(chance.uniform(1, max(1, steps - 1)) for _ in range(faults))
    drawn_kinds = _evenly(kinds, faults, chance)
    elsewhere = {"disk": ["machine"], "child": ["grandchild"]}
    met = {kind: iter(_evenly(elsewhere.get(kind, roles), faults, chance)) for kind in kinds}
    pairs = zip(places, drawn_kinds, strict=True)
    return [Fault(step, kind, next(met[kind]), chance.random()) for step, kind in pairs]


def _evenly(values: Sequence[Kind] | Sequence[str], count: int, chance: random.Random) -> list[Any]:
    """`count` of the values in a random order, each as often as the others, or once more."""
    rounds = [chance.sample(values, len(values)) for _ in range(-(-count // len(values)))]
    return [value for one in rounds for value in one][:count]

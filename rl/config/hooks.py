"""Hooks: what a run does beside its core, in classes that `rollout.hooks` names (docs/hooks.md).

    rollout.hooks: [batch_barrier, {hedging: {quantile: 0.9}}, my_module:MyHook]

A hook says whose it is (`role`) and which options it takes. Each process makes those of its own role, and the simulator
those of all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel

from rl.config.plugins import check_call, load, validated
from rl.config.schema import ConfigError
from rl.config.section import Named, split_named
from rl.config.section import NoOptions as NoOptions

Role = Literal["broker", "proxy", "env_server"]
BUILT_IN = {
    "batch_barrier": "rollout.broker.built_in_hooks:BatchBarrier",
    "hedging": "rollout.broker.built_in_hooks:Hedging",
    "quarantine": "rollout.broker.built_in_hooks:Quarantine",
    "pin_prompts": "rollout.proxy.hooks:PinPrompts",
    "turn_barrier": "rollout.episodes.turn_barrier:TurnBarrier",
}


class Hook:
    """Made as `Kind(options, *parts)`, where the parts are what its role gives (the base class of the role says)."""

    role: ClassVar[Role]
    Options: ClassVar[type[BaseModel]] = NoOptions


def make_hooks(role: Role, named: Sequence[Named], *parts: Any) -> list[Any]:
    """The hooks of this role, in the order of their names. Raises ConfigError, also for a fault of another role's."""
    made = []
    for name, kind, options in list(_chosen(named)):
        if kind.role == role:
            try:
                made.append(kind(options, *parts))
            except (TypeError, ValueError) as error:
                raise ConfigError(f"rollout.hooks={name!r} cannot be made: {error}") from error
    return made


def _chosen(named: Sequence[Named]) -> Iterator[tuple[str, Any, BaseModel]]:
    """Name, class and options of each."""
    for name, options in map(split_named, named):
        kind = load("rollout.hooks", name, BUILT_IN)
        is_hook = isinstance(kind, type) and issubclass(kind, Hook)
        if not is_hook or getattr(kind, "role", None) not in get_args(Role):
            raise ConfigError(f"rollout.hooks={name!r} is no hook: derive it from BrokerHook, ProxyHook or EpisodeHook")
        _check_methods(name, kind)
        yield name, kind, validated(kind.Options, options, f"rollout.hooks.{name}")


def _check_methods(name: str, kind: type[Hook]) -> None:
    """Its methods take what those of its role's base class take. Raises ConfigError."""
    base = next(each for each in kind.__mro__ if Hook in each.__bases__)
    for method, known in vars(base).items():
        own = getattr(kind, method)
        if inspect.isfunction(known) and own is not known and not method.startswith("__"):
            check_call(f"rollout.hooks={name!r}: its {method}", own, *inspect.signature(known).parameters)

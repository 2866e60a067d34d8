"""Losses, advantage estimators and reward shaping by name.

Every module of this package is imported at the first look-up, so a new file with `@register_loss("my_loss", MyOptions)`
is found by itself. What the configuration names by its import path is loaded by `rl.config.plugins` and comes here as
the function itself, registered or not.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar

import msgspec
from torch import Tensor

from algos.aggregation import Aggregation
from algos.types import LossInputs, LossResult

LossFunction = Callable[[LossInputs, Any], LossResult]
NeedsProximal = bool | Callable[[Any], bool]  # of the options
Level = Literal["sample", "turn", "token"]


@dataclass(frozen=True)
class NoOptions:
    """Options of a plug-in that has none."""


@dataclass(frozen=True)
class Spec:
    """A plug-in: its function, and the dataclass of its options, every field of which has a default."""

    kind: ClassVar[str]
    name: str
    function: Callable[..., Any]
    options: type = NoOptions


@dataclass(frozen=True)
class LossSpec(Spec):
    """`function`: (LossInputs, options) -> LossResult; see `algos.types`."""

    kind = "loss"
    needs_proximal: NeedsProximal = False  # with more than one minibatch it costs one more forward
    entropy_gradient: bool = False  # LossInputs.entropy carries a gradient
    advantage: str = "group"  # used unless `algo.advantage` names another one
    aggregation: Aggregation = "token"  # likewise


@dataclass(frozen=True)
class AdvantageSpec(Spec):
    """`function` by level: sample (rewards (N,), group (N,)) -> (N,), turn (Episodes, options) -> (M,), token
    (Episodes, options) -> (T,); see `algos.advantages`."""

    kind = "advantage"
    level: Level = "sample"
    needs_values: bool = False  # a critic
    needs_group: bool = False  # compares members of a group: 0 everywhere in groups of one


@dataclass(frozen=True)
class ShapingSpec(Spec):
    """`function`: (RewardInputs, options) -> rewards (N,); see `algos.rewards`."""

    kind = "shaping"


@dataclass(frozen=True)
class Loss:
    """A loss with its options: what the learner calls."""

    spec: LossSpec
    options: Any

    def __call__(self, inputs: LossInputs) -> LossResult:
        result: LossResult = self.spec.function(inputs, self.options)
        return result

    @property
    def needs_proximal(self) -> bool:
        needs = self.spec.needs_proximal
        return needs if isinstance(needs, bool) else needs(self.options)


_F = TypeVar("_F", bound=Callable[..., Any])
_S = TypeVar("_S", bound=Spec)
_registered: dict[str, dict[str, Any]] = {"loss": {}, "advantage": {}, "shaping": {}}


def register_loss(
    name: str,
    options: type = NoOptions,
    *,
    needs_proximal: NeedsProximal = False,
    entropy_gradient: bool = False,
    advantage: str = "group",
    aggregation: Aggregation = "token",
) -> Callable[[_F], _F]:
    """See `LossSpec`. Raises ValueError for a name that is taken."""
    return _register(LossSpec, name, options, needs_proximal, entropy_gradient, advantage, aggregation)


def register_advantage(
    name: str,
    options: type = NoOptions,
    *,
    level: Level = "sample",
    needs_values: bool = False,
    needs_group: bool = False,
) -> Callable[[_F], _F]:
    """See `AdvantageSpec`. Raises ValueError for a name that is taken."""
    return _register(AdvantageSpec, name, options, level, needs_values, needs_group)


def register_shaping(name: str, options: type = NoOptions) -> Callable[[_F], _F]:
    """See `ShapingSpec`. Raises ValueError for a name that is taken."""
    return _register(ShapingSpec, name, options)


def get_loss(loss: str | LossSpec | LossFunction) -> LossSpec:
    """A loss by its registered name, or by its function. Raises ValueError naming the nearest."""
    return _look_up(LossSpec, loss)


def get_advantage(estimator: str | AdvantageSpec | Callable[..., Tensor]) -> AdvantageSpec:
    """An estimator by its registered name, or by its function (level "sample" unless it is registered).

    Raises ValueError naming the nearest.
    """
    return _look_up(AdvantageSpec, estimator)


def get_shaping(shaping: str | ShapingSpec | Callable[..., Tensor]) -> ShapingSpec:
    """A reward shaping by its registered name, or by its function. Raises ValueError naming the nearest."""
    return _look_up(ShapingSpec, shaping)


def make_loss(loss: str | LossSpec | LossFunction, options: Mapping[str, Any]) -> Loss:
    """A loss and the section `algo.options` of a configuration as one callable."""
    spec = get_loss(loss)
    return Loss(spec, parse_options(spec, options))


def registered(kind: Literal["loss", "advantage", "shaping"]) -> Mapping[str, object]:
    """All plug-ins of a kind by name: what `rl.config.plugins` resolves names of the configuration with."""
    _import_all()
    return _registered[kind]


def parse_options(spec: Spec, options: Mapping[str, Any]) -> Any:
    """The plug-in's options dataclass.

    Raises ValueError for an unknown name, naming the nearest, and for a value that is not of the option's type.
    """
    hints = typing.get_type_hints(spec.options, include_extras=True)
    known = [field.name for field in dataclasses.fields(spec.options)]
    values = {}
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"{spec.kind} {spec.name!r} has no option {key!r}{_nearest(key, known)}")

        what = f"option {key!r} of {spec.kind} {spec.name!r}"
        try:
            values[key] = msgspec.convert(value, hints[key])
        except msgspec.ValidationError as error:
            choices = typing.get_args(hints[key]) if typing.get_origin(hints[key]) is Literal else ()
            expected = " or ".join(map(repr, choices)) or str(error).removeprefix("Expected ").partition(", got ")[0]
            raise ValueError(f"{what} must be {expected}, not {value!r}") from None
        if value != value:
            raise ValueError(f"{what} must be a number, not {value!r}")
    return spec.options(**values)


def _register(kind: type[Spec], name: str, options: type, *traits: Any) -> Callable[[_F], _F]:
    def register(function: _F) -> _F:
        table = _registered[kind.kind]
        if name in table:
            raise ValueError(f"{name!r} is registered twice")
        table[name] = kind(name, function, options, *traits)
        return function

    return register


def _look_up(kind: type[_S], plugin: str | _S | Callable[..., Any]) -> _S:
    _import_all()
    table: Mapping[str, _S] = _registered[kind.kind]
    if isinstance(plugin, str):
        if plugin not in table:
            raise ValueError(f"unknown {kind.kind} {plugin!r}{_nearest(plugin, table)}")
        return table[plugin]

    for spec in table.values():
        if plugin in (spec, spec.function):
            return spec
    if isinstance(plugin, kind):
        return plugin
    assert not isinstance(plugin, Spec), f"a {plugin.kind} is no {kind.kind}"
    if not hasattr(plugin, "__qualname__"):
        raise ValueError(f"{plugin!r} is no {kind.kind}: a function is wanted")
    return kind(f"{plugin.__module__}:{plugin.__qualname__}", plugin, _options_of(plugin))


def _options_of(function: Callable[..., Any]) -> type:
    """The options dataclass of an unregistered plug-in: the annotation of its second parameter."""
    parameters = list(inspect.signature(function).parameters)
    hint = typing.get_type_hints(function).get(parameters[1]) if len(parameters) > 1 else None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else NoOptions


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(valid)) or 'none'}"


@cache
def _import_all() -> None:
    import algos

    for module in pkgutil.iter_modules(algos.__path__):
        importlib.import_module(f"algos.{module.name}")

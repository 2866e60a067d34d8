"""Losses, advantage estimators and reward shaping by name.

Every module of this package is imported at the first look-up, so a new file with `@register_loss("my_loss", MyOptions)`
is found by itself. What the configuration names by its import path is loaded by `rl.core.plugins` and comes here as the
function itself, registered or not.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, Literal

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
class LossSpec:
    kind: ClassVar[str] = "loss"
    name: str
    function: LossFunction
    options: type  # a dataclass; every field has a default
    needs_proximal: NeedsProximal = False  # logp_proximal costs one more forward per batch
    entropy_gradient: bool = False  # LossInputs.entropy carries a gradient
    advantage: str = "group"  # what its paper pairs it with: used unless `algo.advantage` says otherwise
    aggregation: Aggregation = "token"  # likewise


@dataclass(frozen=True)
class AdvantageSpec:
    """`function` by level: sample (rewards (N,), group (N,)) -> (N,), turn (Episodes, options) -> (M,), token
    (Episodes, options) -> (T,); see `algos.advantages`."""

    kind: ClassVar[str] = "advantage"
    name: str
    function: Callable[..., Tensor]
    options: type = NoOptions
    level: Level = "sample"
    needs_values: bool = False  # a critic
    needs_group: bool = False  # compares members of a group: 0 everywhere in groups of one


@dataclass(frozen=True)
class ShapingSpec:
    """`function`: (RewardInputs, options) -> rewards (N,); see `algos.rewards`."""

    kind: ClassVar[str] = "shaping"
    name: str
    function: Callable[..., Tensor]
    options: type = NoOptions


@dataclass(frozen=True)
class Loss:
    """A loss with its options: what the learner calls."""

    spec: LossSpec
    options: Any

    def __call__(self, inputs: LossInputs) -> LossResult:
        return self.spec.function(inputs, self.options)

    @property
    def needs_proximal(self) -> bool:
        needs = self.spec.needs_proximal
        return needs if isinstance(needs, bool) else needs(self.options)

    @property
    def entropy_gradient(self) -> bool:
        return self.spec.entropy_gradient


_losses: dict[str, LossSpec] = {}
_advantages: dict[str, AdvantageSpec] = {}
_shapings: dict[str, ShapingSpec] = {}


def register_loss(
    name: str,
    options: type = NoOptions,
    *,
    needs_proximal: NeedsProximal = False,
    entropy_gradient: bool = False,
    advantage: str = "group",
    aggregation: Aggregation = "token",
) -> Callable[[LossFunction], LossFunction]:
    def register(function: LossFunction) -> LossFunction:
        spec = LossSpec(name, function, options, needs_proximal, entropy_gradient, advantage, aggregation)
        _add(_losses, name, spec)
        return function

    return register


def register_advantage(
    name: str,
    options: type = NoOptions,
    *,
    level: Level = "sample",
    needs_values: bool = False,
    needs_group: bool = False,
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        _add(_advantages, name, AdvantageSpec(name, function, options, level, needs_values, needs_group))
        return function

    return register


def register_shaping(name: str, options: type = NoOptions) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        _add(_shapings, name, ShapingSpec(name, function, options))
        return function

    return register


def get_loss(loss: str | LossSpec | LossFunction) -> LossSpec:
    """A loss by its registered name, or by its function. Raises ValueError naming the nearest."""
    found = _look_up(_losses, "loss", loss)
    return found if isinstance(found, LossSpec) else LossSpec(_path(found), found, _options_of(found))


def get_advantage(estimator: str | AdvantageSpec | Callable[..., Tensor]) -> AdvantageSpec:
    """An estimator by its registered name, or by its function (level "sample" unless it is registered).

    Raises ValueError naming the nearest.
    """
    found = _look_up(_advantages, "advantage", estimator)
    return found if isinstance(found, AdvantageSpec) else AdvantageSpec(_path(found), found)


def get_shaping(shaping: str | ShapingSpec | Callable[..., Tensor]) -> ShapingSpec:
    """A reward shaping by its registered name, or by its function. Raises ValueError naming the nearest."""
    found = _look_up(_shapings, "shaping", shaping)
    return found if isinstance(found, ShapingSpec) else ShapingSpec(_path(found), found, _options_of(found))


def make_loss(loss: str | LossSpec | LossFunction, options: Mapping[str, Any]) -> Loss:
    """A loss and the section `algo.options` of a configuration as one callable."""
    spec = get_loss(loss)
    return Loss(spec, parse_options(spec, options))


def registered(kind: Literal["loss", "advantage", "shaping"]) -> Mapping[str, object]:
    """All plug-ins of a kind by name: what `rl.core.plugins` resolves names of the configuration with."""
    _import_all()
    tables: dict[str, Mapping[str, object]] = {"loss": _losses, "advantage": _advantages, "shaping": _shapings}
    return tables[kind]


def loss_names() -> list[str]:
    return sorted(registered("loss"))


def advantage_names() -> list[str]:
    return sorted(registered("advantage"))


def shaping_names() -> list[str]:
    return sorted(registered("shaping"))


def parse_options(spec: LossSpec | AdvantageSpec | ShapingSpec, options: Mapping[str, Any]) -> Any:
    """The plug-in's options dataclass. Raises ValueError for an unknown name (naming the nearest) or a wrong type."""
    hints = typing.get_type_hints(spec.options)
    known = [field.name for field in dataclasses.fields(spec.options)]
    values = {}
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"{spec.kind} {spec.name!r} has no option {key!r}{_nearest(key, known)}")
        values[key] = _checked(f"option {key!r} of {spec.kind} {spec.name!r}", hints[key], value)
    return spec.options(**values)


def _checked(what: str, hint: Any, value: Any) -> Any:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if float in allowed and type(value) is int:
        return float(value)
    if type(value) not in allowed and not (value is None and type(None) in allowed):
        names = " or ".join(getattr(kind, "__name__", str(kind)) for kind in allowed)
        raise ValueError(f"{what} must be {names}, not {value!r}")
    return value


def _look_up(table: Mapping[str, Any], kind: str, plugin: Any) -> Any:
    _import_all()
    if not isinstance(plugin, str):
        return next((spec for spec in table.values() if plugin in (spec, spec.function)), plugin)
    if plugin not in table:
        raise ValueError(f"unknown {kind} {plugin!r}{_nearest(plugin, table)}")
    return table[plugin]


def _path(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def _options_of(function: Callable[..., Any]) -> type:
    """The options dataclass of an unregistered plug-in: the annotation of its second parameter."""
    parameters = list(inspect.signature(function).parameters)
    hint = typing.get_type_hints(function).get(parameters[1]) if len(parameters) > 1 else None
    return hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else NoOptions


def _add(table: dict[str, Any], name: str, value: Any) -> None:
    if name in table:
        raise ValueError(f"{name!r} is registered twice")
    table[name] = value


def _nearest(name: str, valid: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(sorted(valid)) or 'none'}"


@cache
def _import_all() -> None:
    import algos

    for module in pkgutil.iter_modules(algos.__path__):
        importlib.import_module(f"algos.{module.name}")

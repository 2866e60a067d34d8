"""Losses, advantage estimators and reward shaping by name.

Every module of this package is imported at the first look-up, so a new file with `@register_loss("my_loss", MyOptions)`
is found by itself. Outside the package, `module:function` and `module.function` name a function, and `module` alone the
one thing that the module registers.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import importlib.util
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


def get_loss(name: str) -> LossSpec:
    """A registered loss, or the one at an import path. Raises ValueError naming the nearest."""
    found = _look_up(_losses, "loss", name)
    return found if isinstance(found, LossSpec) else LossSpec(name, found, _options_of(found))


def get_advantage(name: str) -> AdvantageSpec:
    """A registered estimator, or the one at `module:function` (level "sample" unless it is registered).

    Raises ValueError naming the nearest.
    """
    found = _look_up(_advantages, "advantage", name)
    return found if isinstance(found, AdvantageSpec) else AdvantageSpec(name, found)


def get_shaping(name: str) -> ShapingSpec:
    """A registered reward shaping, or the one at `module:function`. Raises ValueError naming the nearest."""
    found = _look_up(_shapings, "shaping", name)
    return found if isinstance(found, ShapingSpec) else ShapingSpec(name, found, _options_of(found))


def make_loss(name: str, options: Mapping[str, Any]) -> Loss:
    """`algo.loss` and `algo.options` of a configuration as one callable."""
    spec = get_loss(name)
    return Loss(spec, parse_options(spec, options))


def loss_names() -> list[str]:
    _import_all()
    return sorted(_losses)


def advantage_names() -> list[str]:
    _import_all()
    return sorted(_advantages)


def shaping_names() -> list[str]:
    _import_all()
    return sorted(_shapings)


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


def _look_up(table: Mapping[str, Any], kind: str, name: str) -> Any:
    if ":" in name or "." in name:
        try:
            return _imported(table, kind, name)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"{kind} {name!r} cannot be imported: {error}") from None
    _import_all()
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}{_nearest(name, table)}")
    return table[name]


def _imported(table: Mapping[str, Any], kind: str, path: str) -> Any:
    """What stands at `module:function` or `module.function`, or the only plug-in that the module `path` registers."""
    if ":" not in path and _is_module(path):
        importlib.import_module(path)
        own = {name: spec for name, spec in table.items() if spec.function.__module__ == path}
        if len(own) != 1:
            found = f"registers {', '.join(sorted(own))}: choose one by name" if own else f"registers no {kind}"
            raise ValueError(f"{kind} {path!r}: the module {found}, or write module:function")
        return next(iter(own.values()))
    module, _, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    return next((spec for spec in table.values() if spec.function is found), found)


def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:  # what stands before the last dot is a module without parts, or missing
        return False


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

"""`learner.compile`: what torch compiles of a model, so that one kernel does what many do otherwise.

Lengths are symbols in compiled code: packs of new lengths compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import nn

BACKEND = "inductor"
_VARIANTS = 64
"""Versions of one function that may be compiled: with a gradient or without, for each kind of layer, for each model of
a process. Beyond torch's own limit of 8 it would go on without compiling."""

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """A function that stands in a module; it is compiled at its first call."""
    return cast(F, _made(function, BACKEND))


def left_alone(function: F) -> F:
    """Compiled code calls this function as it is."""
    return cast(F, torch.compiler.disable(function))


def asked_once(function: F) -> F:
    """Compiled code keeps the answer of this function."""
    return cast(F, torch.compiler.assume_constant_result(function))


def compile_layers(decoder: Any, apart: Collection[nn.Module] = ()) -> None:
    """Every layer's forward is compiled; what hooks do around it, as gathering its weights, is not.

    apart: parts of layers that stay as they are, as experts, whose products depend on what a router chose. Raises
    ValueError where torch is told to compile nothing.
    """
    if torch._dynamo.config.disable:
        raise ValueError("learner.compile=true, but TORCHDYNAMO_DISABLE is set, so torch compiles nothing: unset one")
    for each in apart:
        each.forward = left_alone(each.forward)
    for layer in decoder.layers:
        layer.forward = _compile(layer.forward, BACKEND)


def while_compiling(watch: Callable[[], AbstractContextManager[None]]) -> None:
    """From now on torch compiles inside of what `watch` gives, in the thread that compiles: a layer takes tens of
    seconds, in which nothing else of its process advances."""
    inside = ExitStack()

    def begin(*_: object) -> None:  # older versions of torch tell nothing
        inside.enter_context(watch())

    def end(*_: object) -> None:
        inside.close()

    compilations = torch._dynamo.callback.callback_handler
    compilations.register_start_callback(begin)
    compilations.register_end_callback(end)


@cache
def _made(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return _compile(function, backend)


def _compile(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.config.recompile_limit = _VARIANTS
    made: Callable[..., Any] = torch.compile(function, dynamic=True, backend=backend)
    return made

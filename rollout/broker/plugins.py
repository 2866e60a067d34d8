"""Priorities and curricula by name: built in, or importable as `module:Class`."""

from __future__ import annotations

import importlib
from typing import Any

from rl.core.config import ConfigError, nearest


def make(field: str, name: str, known: dict[str, str], **arguments: Any) -> Any:
    """An instance of the class that configuration field `field` names. Raises ConfigError."""
    target = known.get(name, name)
    module, separator, attribute = target.partition(":")
    if not separator:
        raise ConfigError(f"{field}={name!r} is neither built in nor module:Class{nearest(name, list(known))}")
    try:
        return getattr(importlib.import_module(module), attribute)(**arguments)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{field}={name!r} cannot be made from {target}: {error}") from error

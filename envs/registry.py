"""Environment families by name, and the checks that run before any process starts.

A family is loaded lazily: naming one environment never imports another's libraries. Anything else importable as
`package.module:Name` works without registration.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from rl.core.config import Config, ConfigError, nearest
from rl.core.plugins import load
from rollout.episodes.environment import EnvironmentFamily

FAMILIES = {
    "alfworld": "envs.alfworld.environment:AlfworldFamily",
    "code": "envs.code.environment:CodeFamily",
    "math": "envs.math.environment:MathFamily",
    "swe": "envs.swe.environment:SweFamily",
    "synthetic": "envs.synthetic:SyntheticFamily",
}
DEMONSTRATORS = {
    "alfworld": "envs.alfworld.demonstrations:demonstrate",
    "swe": "envs.swe.demonstrations:demonstrate",
}


def load_family(name: str) -> type[EnvironmentFamily]:
    """The class registered as `name`, or importable as `package.module:Name`. Raises ConfigError."""
    family: type[EnvironmentFamily] = load("env.name", name, FAMILIES)
    if not hasattr(family, "Options"):
        raise ConfigError(f"env.name={name!r} has no Options and is no EnvironmentFamily")
    return family


def demonstrator(name: str) -> Any:
    """The coroutine function that plays an environment's training tasks (`model.warm_start`). Raises ConfigError."""
    if name not in DEMONSTRATORS:
        known = ", ".join(DEMONSTRATORS)
        raise ConfigError(f"model.warm_start.demonstrations: env.name={name!r} has no demonstrator ({known} has)")
    return load("env.name", name, DEMONSTRATORS)


def make_family(config: Config) -> EnvironmentFamily:
    """The configured family, its options validated and its tasks loaded; nothing is started. Raises ConfigError."""
    family = load_family(config.env.name)
    options = _validated(family, config.env.options)
    try:
        return family(options, config.seed)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"env {config.env.name!r}: {error}") from error


def validate_options(config: Config) -> Any:
    """`env.options`, checked; nothing is loaded. Raises ConfigError, one line."""
    return _validated(load_family(config.env.name), config.env.options)


def validate_env(config: Config, dry: bool = False) -> tuple[int, int]:
    """For the preflight: (train tasks, eval tasks). Raises ConfigError, one line.

    `dry`: nothing is made; a family whose tasks take long to make says how many there will be, in `planned(options)`.
    """
    kind = load_family(config.env.name)
    options = validate_options(config)
    planned = kind.planned(options) if dry and hasattr(kind, "planned") else None
    if planned is None:
        family = make_family(config)
        planned = {split: family.task_count(split) for split in ("train", "eval")}

    train = planned["train"]
    held_out = planned["eval"]
    if train < 1:
        raise ConfigError(f"env {config.env.name!r} has no training task")
    if config.eval.tasks > held_out:
        raise ConfigError(f"eval.tasks={config.eval.tasks}: env {config.env.name!r} has only {held_out} held-out tasks")
    return train, held_out


def _validated(family: type[EnvironmentFamily], options: dict[str, Any]) -> Any:
    known = list(family.Options.model_fields)
    for key in options:  # here, so that a model that forgot extra="forbid" is closed as well
        if key not in known:
            raise ConfigError(f"unknown key 'env.options.{key}'{nearest(key, known)}")
    try:
        return family.Options.model_validate(options)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(["env.options", *(str(part) for part in first["loc"])])
        reason = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{where}={first['input']!r}: {reason}" if first["loc"] else reason) from None

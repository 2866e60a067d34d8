"""`fresco env check NAME [key=value ...]`: what an environment must hold before a model is trained in it, on one page.

NAME is a registered environment or `package.module:Name`; fields are those of a recipe, such as
`env.options.dataset=countdown`. Where a recipe `<NAME>_cpu.yaml` comes with Fresco, its fields are the defaults.
"""

from __future__ import annotations

import argparse
import dataclasses

import msgspec

from envs.check.checks import SHORT, Scope
from envs.check.difficulty import Model, endpoint
from envs.check.run import check_environment
from envs.registry import load_family, validate_options
from launch.terminal import say
from rl.config.recipes import SHIPPED
from rl.config.schema import ConfigError, load_config

TURNS = 20  # of an episode, where no recipe says how many


def check(arguments: argparse.Namespace) -> int:
    """Returns 0 if every check holds, else 1. Raises ConfigError."""
    shipped = SHIPPED / f"{arguments.name}_cpu.yaml"
    recipe = arguments.recipe or (shipped if shipped.exists() else None)
    turns = [] if recipe is not None else [f"env.max_turns={TURNS}"]
    config = load_config(recipe, [*turns, *arguments.overrides, f"env.name={arguments.name}"])
    validate_options(config)
    if getattr(load_family(config.env.name), "foreign", False):
        why = "its agent owns the loop, and the scripted agents of the check play reset and step"
        raise ConfigError(f"fresco env check {arguments.name}: {why}; check the environment that the agent works in")

    scope = SHORT if arguments.short else Scope()
    if arguments.episodes is not None:
        scope = dataclasses.replace(scope, episodes=arguments.episodes)
    page = check_environment(config, scope, _model(arguments))
    say(page.text())

    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(page), indent=1) + b"\n")
    return 1 if page.failed else 0


def _model(arguments: argparse.Namespace) -> Model | None:
    if arguments.model is None:
        return None
    url, separator, name = arguments.model.rpartition("#")
    if not separator:
        raise ConfigError(f"--model {arguments.model!r}: write URL#NAME, such as http://127.0.0.1:8000/v1#my-model")
    return Model(endpoint(url, name), arguments.tries)

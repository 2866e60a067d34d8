"""`fresco run --help-fields PATTERN`: fields whose name or help matches, with type and default."""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterator

from pydantic import BaseModel

from envs.registry import load_family
from launch.refusing import Refusing
from rl.config.fields import Described, described, sections
from rl.config.lora import LoraOptions
from rl.config.plugins import load
from rl.config.schema import Config, ConfigError, load_config
from rl.learner.simulated import OPTIONS as LEARNERS
from rollout.generator.engines import OPTIONS as ENGINES


def help_fields(arguments: argparse.Namespace) -> int:
    """The options of environment, engine and learner are those of the recipe. Raises ConfigError where none matches."""
    with Refusing(f"--help-fields {arguments.help_fields!r} is no regular expression", re.error):
        wanted = re.compile(arguments.help_fields, re.IGNORECASE | re.MULTILINE)
    known = dict(_fields(load_config(arguments.recipe, arguments.overrides)))
    found = {name: field for name, field in known.items() if wanted.search(f"{name}\n{field.says}")}
    if not found:
        raise ConfigError(f"--help-fields {arguments.help_fields!r}: no field is called or says so; try another")

    for name, field in found.items():
        default = f"default {field.default.strip('`')}" if field.default else "required"
        print(f"{name}  ({field.type.replace('`', '')}; {default})")
        print(textwrap.fill(field.says, 100, initial_indent="    ", subsequent_indent="    "))
    return 0


def _fields(config: Config) -> Iterator[tuple[str, Described]]:
    """By their dotted names."""
    models: list[tuple[str, type[BaseModel]]] = list(sections(Config))
    family = load_family(config.env.name)
    models.append(("env.options", family.Options))
    models.append(("generator.options", load("generator.engine", config.generator.engine, ENGINES)))
    models.append(("learner.options", load("learner.kind", config.learner.kind, LEARNERS)))
    models.append(("model.lora", LoraOptions))
    for title, model in models:
        for field in described(model):
            yield ".".join(filter(None, (title, field.name))), field

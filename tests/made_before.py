"""What several long tests begin with. Each asks for it before it counts time of its own."""

from __future__ import annotations

from launch.prepare import prepare
from rl.config.recipes import find_recipe
from rl.config.schema import load_config


def make_arithmetic_model() -> None:
    """`math_cpu`'s, unless the cache has it: it takes minutes of one core."""
    prepare(load_config(find_recipe("math_cpu")))

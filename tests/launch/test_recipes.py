"""Every recipe that ships is valid, its environment's options included."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.registry import validate_options
from rl.config import load_config

RECIPES = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(recipe: Path) -> None:
    validate_options(load_config(recipe))


def test_an_override_is_checked_against_the_environment() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'env\.options\.splt'; did you mean 'split'"):
        validate_options(load_config(RECIPES[0].with_name("math_8gpu.yaml"), ["env.options.splt=x"]))

"""Every recipe that ships is valid: its dry run ends well and shows its processes; its options are checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.registry import validate_options
from launch import preflight
from launch.cli import main
from launch.plan import make_plan
from launch.prepare import Prepared, validate
from rl.config.schema import Config, load_config

RECIPES = sorted((Path(__file__).parents[2] / "experiments").glob("*.yaml"))


@pytest.fixture(autouse=True)
def prepared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dry run checks in a child of its own, here: a child per recipe would import torch each time."""

    def prepare(config: Config, *, make: bool, begin: object) -> Prepared:
        assert not make, "a dry run fetches and makes no model"
        validate(config)
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_valid(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(recipe), "--dry-run", "-v"]) == 0
    told = capsys.readouterr().out
    assert "dry run: the configuration is valid; nothing was started" in told
    for spec in make_plan(load_config(recipe), "cpu"):
        assert spec.name in told


def test_an_override_is_checked_against_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = RECIPES[0].with_name("math_8gpu.yaml")
    message = "unknown key 'env.options.splt'; did you mean 'split'"
    with pytest.raises(ValueError, match=message):
        validate_options(load_config(recipe, ["env.options.splt=x"]))
    assert main(["run", str(recipe), "env.options.splt=x", "--dry-run"]) == 2
    assert message in capsys.readouterr().err

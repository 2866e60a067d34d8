"""Configuration: bad input gets one line that names the field, the value and the fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.core.config import Config, ConfigError, Section, load_config

RECIPES = sorted((Path(__file__).parents[3] / "experiments").glob("*.yaml"))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.alfa=1", ["rollout.alfa", "'alpha'"]),
        ("rollout.alpha=-1", ["rollout.alpha", "-1", "greater than or equal to 0"]),
        ("sampling.top_p=0.9", ["top_p=0.9", "top_p=1"]),
        ("learner.minibatches=3", ["learner.minibatches=3", "groups_per_batch=16"]),
        ("sampling.max_tokens=4096", ["max_tokens=4096", "max_model_len=2048"]),
        ("generator.engine=vlm", ["generator.engine", "'vlm'", "'vllm'"]),
        ("steps", ["key=value"]),
        ("rollout.alpha.x=1", ["rollout.alpha"]),
    ],
)
def test_bad_input_is_one_clear_line(override: str, parts: list[str]) -> None:
    tree = ["rollout.alpha=1", override] if override.startswith("rollout.alpha.x") else [override]
    with pytest.raises(ConfigError) as caught:
        load_config(None, tree)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_overrides_reach_their_field_and_numbers_are_numbers() -> None:
    config = load_config(None, ["learner.lr=1e-4", "rollout.alpha=0.5", "name=a", "rollout.hold_patience=.inf"])
    assert config.learner.lr == 1e-4 and config.rollout.alpha == 0.5 and config.name == "a"
    assert config.rollout.hold_patience == float("inf")


@pytest.mark.parametrize(("alpha", "bound"), [(0, 0), (0.5, 1), (1, 1), (1.2, 2), (4, 4)])
def test_staleness_bound_is_ceil_alpha(alpha: float, bound: int) -> None:
    assert load_config(None, [f"rollout.alpha={alpha}"]).rollout.staleness_bound == bound


def test_recipe_extends_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("steps: 5\nrollout: {alpha: 2, group_size: 4}\n")
    (tmp_path / "child.yaml").write_text("base: base.yaml\nrollout: {alpha: 3}\n")
    config = load_config(tmp_path / "child.yaml")
    assert (config.steps, config.rollout.alpha, config.rollout.group_size) == (5, 3, 4)


def test_missing_and_malformed_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(tmp_path / "bad.yaml")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_valid(recipe: Path) -> None:
    assert load_config(recipe).name == recipe.stem


def test_resolved_configuration_round_trips() -> None:
    config = load_config(None, ["rollout.hold_patience=.inf"])
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_every_field_has_help() -> None:
    for section in (Config, *Section.__subclasses__()):
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
            assert field.description or is_section, f"{section.__name__}.{name} has no help text"


def test_keys_within_lists_are_checked() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'algo\.shaping\.0\.option'; did you mean 'options'\?"):
        load_config(None, ["algo.shaping=[{name: overlong, option: {}}]"])

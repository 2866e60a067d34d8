"""Configuration: bad input gets one line that names the field, the value and the fix; one place for each default."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl.config.recipes import SHIPPED
from rl.config.schema import Config, ConfigError, load_config
from rl.config.section import Section
from rl.config.tree import UNNAMED, removed_fields
from rl.wire.run import RunFile
from tests.conftest import MakeRun

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "experiments").glob("*.yaml"))
NO_ENDPOINTS = ("http://host:8000/v1", "https://host/v1#", "http://#name", "host://8000/v1#name")


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("rollout.alfa=1", ["rollout.alfa", "'alpha'"]),
        ("rollout.alpha=-1", ["rollout.alpha", "-1", "greater than or equal to 0"]),
        ("sampling.top_p=0.9", ["sampling.top_p was removed", "samples from the whole distribution"]),
        ("learner.minibatches=3", ["learner.minibatches=3", "groups_per_batch=16"]),
        ("sampling.max_tokens=4096", ["max_tokens=4096", "max_model_len=2048"]),
        ("generator.engine=vlm", ["generator.engine", "'vlm'", "'vllm'"]),
        ("steps", ["key=value"]),
        ("rollout.alpha.x=1", ["rollout.alpha"]),
        ("rollout.alpha=.inf", ["rollout.alpha", "finite"]),
        ("name=.", ["name='.'", "without a slash"]),
        ("name=../evil", ["name='../evil'", "without a slash"]),
        ("eval.sets={a: 5}", ["eval.sets.a=5: Input should be a valid string, or a valid dictionary"]),
        ("eval.sets={a/b: rows}", ["eval.sets.a/b='a/b': "]),
        *((f"algo.teacher={url}", [f"algo.teacher={url!r}: ", "URL#NAME"]) for url in NO_ENDPOINTS),
        ("algo.teacher=http://host:99999/v1#m", ["algo.teacher='http://host:99999/v1#m': Port out of range"]),
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


@pytest.mark.parametrize("field", ["tracking.trace", "tracking.replay", "weights.delta", "learner.router_replay"])
def test_the_word_off_is_no_false(field: str) -> None:
    """YAML reads it as false; a field that is true or false stays one."""
    config = load_config(None, [f"{field}=off", "weights.probe=off"])
    section, _, name = field.partition(".")
    assert getattr(getattr(config, section), name) == "off" and config.weights.probe is False


def test_an_empty_string_stays_one() -> None:
    assert load_config(None, ["tracking.project="]).tracking.project == ""


@pytest.mark.parametrize(("alpha", "bound"), [(0, 0), (0.5, 1), (1, 1), (1.2, 2), (4, 4)])
def test_staleness_bound_is_ceil_alpha(alpha: float, bound: int) -> None:
    assert load_config(None, [f"rollout.alpha={alpha}"]).rollout.staleness_bound == bound


def test_staleness_may_be_allowed_beyond_alpha_but_not_below() -> None:
    assert load_config(None, ["rollout.alpha=1.5", "rollout.max_staleness=6"]).rollout.staleness_bound == 6
    assert load_config(None, ["rollout.alpha=1.5", "rollout.max_staleness=2"]).rollout.staleness_bound == 2
    with pytest.raises(ConfigError, match=r"rollout\.max_staleness=1 is below 2, which rollout\.alpha=1\.5 needs"):
        load_config(None, ["rollout.alpha=1.5", "rollout.max_staleness=1"])


def test_a_recipe_names_what_stands_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`./` is its own folder, and a base's is the base's, from wherever it is used; other paths are the user's."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "base.yaml").write_text("runs: ./runs\nenv: {name: dataset, options: {source: ./base.jsonl}}\n")
    (mine / "recipe.yaml").write_text(
        "base: ../base.yaml\nmodel: {path: models/mine}\n"
        "env: {options: {source: ./rows.jsonl, reward: {./reward.py:right: 1.0, ../other.py:right: 0.5}}}\n"
    )
    monkeypatch.chdir(tmp_path)
    config = load_config("mine/recipe.yaml", ["env.options.eval_source=./rows.jsonl"])
    assert config.runs == tmp_path / "runs" and config.model.path == "models/mine"
    assert config.env.options == {
        "source": str(mine / "rows.jsonl"),
        "reward": {f"{mine}/reward.py:right": 1.0, f"{tmp_path}/other.py:right": 0.5},
        "eval_source": "./rows.jsonl",
    }


def test_recipe_extends_base(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("steps: 5\nrollout: {alpha: 2, group_size: 4}\n")
    (tmp_path / "child.yaml").write_text("base: base.yaml\nrollout: {alpha: 3}\n")
    config = load_config(tmp_path / "child.yaml")
    assert (config.steps, config.rollout.alpha, config.rollout.group_size) == (5, 3, 4)


DEEP = "env: {options: " + "[" * 60 + "]" * 60 + "}"
BOMB = "a: &a [1, 2, 3, 4, 5, 6, 7, 8]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 8)}]\n" for before, name in pairwise("abcdefgh")
)
REFUSED_YAML = {
    "steps: 5\nrollout:\n  alpha: 1\n  alpha: 2\n": "line 4: the key 'alpha' stands already in line 3; keep one",
    "env:\n  options: {members: {a: {env: math}, 'a': {env: code}}}\n": "line 2: the key 'a' stands already in line 2",
    "env:\n  options:\n    1: a\n    0x1: b\n": "line 4: the key '0x1' stands already in line 3",
    "env:\n  options: {true: 1, yes: 2}\n": "line 2: the key 'yes' stands already in line 2",
    BOMB: "line 6: written out, its aliases are more than 100000 values",
    "env: &a {options: *a}": "line 1: an alias contains itself",
    "env: &a [[*a]]": "line 1: an alias contains itself",
    DEEP: "nested more than 50 levels deep",
    "env: " + "[" * 5000: "nested more than 50 levels deep",
    "a: &a1 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(2, 90)): "nested more than 50 levels deep",
    "name: 2024-13-45": "is not valid YAML: month must be in 1..12",
    f"seed: {'9' * 5000}": "is not valid YAML",
}


@pytest.mark.parametrize("text", REFUSED_YAML, ids=lambda text: re.sub(r"\W+", "-", text[:30]))
@pytest.mark.parametrize("included", [False, True])
def test_yaml_that_says_two_things_or_far_too_much_is_one_line(tmp_path: Path, text: str, included: bool) -> None:
    """Also in a recipe that another one extends."""
    (tmp_path / "recipe.yaml").write_text(text)
    (tmp_path / "child.yaml").write_text("base: recipe.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / ("child.yaml" if included else "recipe.yaml"))
    message = str(caught.value)
    assert message.startswith(f"recipe '{tmp_path}/recipe.yaml'") and REFUSED_YAML[text] in message
    assert "\n" not in message and len(message) < 400


def test_an_override_says_one_thing_too() -> None:
    with pytest.raises(ConfigError, match=r"override 'env.options=\{a: 1, a: 2\}': line 1: the key 'a' stands already"):
        load_config(None, ["env.options={a: 1, a: 2}"])
    with pytest.raises(ConfigError, match="nested more than 50 levels deep"):
        load_config(None, ["env.options=" + "[" * 5000])
    assert load_config(None, ["name=2024-13-45"]).name == "2024-13-45", "no date, so a text"


def test_anchors_that_write_something_once_are_fine(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("env: {options: {a: &a {x: 1}, b: *a, c: {<<: *a, x: 2}}}\n", encoding="utf-8")
    assert load_config(tmp_path / "a.yaml").env.options == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 2}}


def test_another_plugin_brings_its_own_options(tmp_path: Path) -> None:
    """In a recipe that extends another, and in overrides, whatever their order; the same one keeps the base's."""
    base = (
        "algo: {loss: ppo, options: {clip_high: 0.3}}\nenv: {name: math, options: {source: a.jsonl, eval_count: 5}}\n"
    )
    (tmp_path / "base.yaml").write_text(base)
    (tmp_path / "child.yaml").write_text(
        "base: base.yaml\nalgo: {loss: tis, options: {cap: 2}}\nenv: {options: {eval_count: 6}}\n"
    )
    child = load_config(tmp_path / "child.yaml")
    assert child.algo.options == {"cap": 2} and child.env.options == {"source": "a.jsonl", "eval_count": 6}

    for overrides in (["algo.loss=tis", "algo.options.cap=2"], ["algo.options.cap=2", "algo.loss=tis"]):
        assert load_config(tmp_path / "base.yaml", overrides).algo.options == {"cap": 2}
    assert load_config(tmp_path / "base.yaml", ["algo.loss=ppo"]).algo.options == {"clip_high": 0.3}
    assert load_config(tmp_path / "base.yaml", ["env.name=synthetic"]).env.options == {}

    (tmp_path / "gae.yaml").write_text("algo: {advantage: {gae: {lam: 0.9}}}\n")
    (tmp_path / "child.yaml").write_text("base: gae.yaml\nalgo: {advantage: {turn: {}}}\n")
    assert load_config(tmp_path / "child.yaml").algo.advantage == {"turn": {}}


def test_a_recipe_without_a_name_has_the_defaults_options(tmp_path: Path) -> None:
    for name, default in UNNAMED.items():
        section, _, field = name.partition(".")
        assert getattr(getattr(Config(), section), field) == default
    own = {"kv_cache_bytes": 4096}
    (tmp_path / "base.yaml").write_text(f"generator: {{options: {json.dumps(own)}}}\n")
    for engine, options in (("vllm", own), ("simulated", {})):
        assert load_config(tmp_path / "base.yaml", [f"generator.engine={engine}"]).generator.options == options


def test_missing_and_malformed_recipes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"does not exist: there is no {tmp_path}/none.yaml; there are none here$"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("name: x\na: [")
    with pytest.raises(ConfigError, match="not valid YAML: line 2: expected the node content"):
        load_config(tmp_path / "bad.yaml")


def test_a_base_is_what_the_command_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From any folder: by the name of a recipe that ships, by a file beside the recipe, with or without `.yaml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    own = tmp_path / "deep" / "own.yaml"
    shipped = load_config("math_cpu")
    for base in ("math_cpu", "math_cpu.yaml", "experiments/math_cpu.yaml"):
        own.write_text(f"base: {base}\nname: own")
        assert load_config("deep/own") == load_config(own) == shipped.model_copy(update={"name": "own"})

    (tmp_path / "deep" / "math_cpu.yaml").write_text("base: swe_cpu")
    assert load_config(own).env.name == "math", "experiments/ names the one that ships"
    own.write_text("base: math_cpu.yaml")
    assert load_config(own).env.name == "swe", "one of the user's own comes first"


def test_a_recipe_that_is_nowhere_is_told_with_the_places_and_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config("math_cpi")
    places = f"{tmp_path}/math_cpi nor {SHIPPED}/math_cpi.yaml nor {tmp_path}/math_cpi.yaml"
    assert str(caught.value) == f"recipe 'math_cpi' does not exist: there is no {places}; did you mean 'math_cpu'?"

    (tmp_path / "first.yaml").write_text("base: secnd")
    (tmp_path / "second.yaml").touch()
    with pytest.raises(ConfigError, match=r"recipe '.*first\.yaml': base='secnd' .*; did you mean 'second\.yaml'\?"):
        load_config("first")

    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "third.yaml").write_text("name: third")
    for wrong, right in (
        ("deep/thrd.yaml", "deep/third.yaml"),
        ("deep/third.yamll", "deep/third.yaml"),
        ("exprments/math_cpu.yaml", "math_cpu"),
    ):
        with pytest.raises(ConfigError, match=re.escape(f"; did you mean {right!r}?")):
            load_config(wrong)
        load_config(right)  # what it names is there


def test_a_section_is_no_field() -> None:
    with pytest.raises(ConfigError, match=r"model='mine': it is a section of fields; set one, such as model\.path"):
        load_config(None, ["model=mine"])


@pytest.mark.parametrize(
    ("item", "right"),
    [("lr=1", "'learner.lr'"), ("generator.lr=1", "'learner.lr'"), ("dtype=x", "'model.dtype' or 'generator.dtype'")],
)
def test_a_field_without_its_section_is_told_with_it(item: str, right: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"unknown key '{item.partition('=')[0]}'; did you mean {right}?")):
        load_config(None, [item])


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_every_recipe_is_valid(recipe: Path) -> None:
    assert load_config(recipe).name == recipe.stem


def test_resolved_configuration_round_trips() -> None:
    config = load_config(None, ["rollout.hold_patience=.inf"])
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_every_field_has_help() -> None:
    sections: list[type[Section]] = [Config, *Section.__subclasses__()]
    for section in sections:
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, Section)
            assert field.description or is_section, f"{section.__name__}.{name} has no help text"


def test_what_an_earlier_version_wrote_of_a_shaping_is_told_the_new_form() -> None:
    told = r"^algo\.shaping\.0=.*: write the plug-in's name, or \{name: \{option: value\}\}$"
    with pytest.raises(ConfigError, match=told):
        load_config(None, ["algo.shaping=[{name: overlong, options: {}}]"])


def configured(section: type[Section], prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Name, path and default of every field."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from configured(field.annotation, f"{prefix}{name}.")
        else:
            yield name, prefix + name, field.get_default(call_default_factory=True)


def literal_defaults(path: Path) -> Iterator[tuple[str, str, Any]]:
    """Owner, name and default of every parameter and of every field of a class, where the default is a literal."""
    for node in ast.walk(ast.parse(path.read_text())):
        owner = ""
        given: list[tuple[str, ast.expr | None]] = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            owner = node.name
            positional = node.args.posonlyargs + node.args.args
            defaults = node.args.defaults
            given += [(each.arg, value) for each, value in zip(positional[-len(defaults) :], defaults, strict=False)]
            keywords = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
            given += [(each.arg, value) for each, value in keywords]

        elif isinstance(node, ast.ClassDef):
            owner = node.name
            fields = [each for each in node.body if isinstance(each, ast.AnnAssign)]
            given += [(each.target.id, each.value) for each in fields if isinstance(each.target, ast.Name)]

        for name, value in given:
            if isinstance(value, ast.Constant):
                yield owner, name, value.value


NEUTRAL = {"0", "0.0", "1", "1.0", "None", "False", "True", "''", "'none'"}
"""What says "nothing of the kind" is no choice that could drift."""
OTHER_FIELDS = {("Generators", "on_update")}  # the simulator knows two of its values only


def test_a_default_of_the_configuration_stands_nowhere_else() -> None:
    known: dict[str, list[tuple[str, Any]]] = {}
    for name, path, default in configured(Config):
        known.setdefault(name, []).append((path, default))

    again = []
    for package in ("algos", "rl", "rollout", "launch"):
        for file in (ROOT / package).rglob("*.py"):
            if file.parent == ROOT / "rl" / "config":
                continue
            for owner, name, default in literal_defaults(file):
                own = owner.endswith("Options") or (owner, name) in OTHER_FIELDS  # a plug-in's options are its own
                if not own and repr(default) not in NEUTRAL:
                    for path, configured_default in known.get(name, []):
                        if default == configured_default:
                            again.append(f"{file.relative_to(ROOT)}: {owner}.{name} repeats {path}={default!r}")
    assert not again, "\n".join(again)


FIELD = re.compile(r"\b[a-z_]+(?:\.[a-z_-]+)+\b")
REMOVED = removed_fields()


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_field_fails_in_one_line_that_names_what_to_write(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"{name}=1"])
    assert str(caught.value) == f"{name} was removed: write {REMOVED[name]}"

    known = {path for _, path, _ in configured(Config)}
    assert name not in known
    for told in FIELD.findall(REMOVED[name]):
        assert known & {told, ".".join(told.split(".")[:2])}, f"{told} is no field either"


def test_what_an_earlier_version_wrote_is_refused_in_one_line(tmp_path: Path, make_run: MakeRun) -> None:
    """A run's config.yaml, which `fresco eval` reads, and its run.json, which reports and processes read."""
    old = {"steps": 5, "alarms": {"patience": 3, "ess": 0.2}, "generator": {"simulated": {"load_s": 0.1}}}
    told = "generator.simulated was removed: write generator.options, with the same names (2 more fields of an earlier "
    told += "version are named as well)"

    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old))
    with pytest.raises(ConfigError, match=re.escape(told)):
        load_config(tmp_path / "config.yaml")

    file = make_run().folder / "run.json"
    run = json.loads(file.read_text())
    run["config"]["alarms"]["patience"] = 3
    file.write_text(json.dumps(run))
    with pytest.raises(ConfigError, match=r"alarms\.patience was removed: write alarms\.limits\.ALARM\.steps; begin"):
        RunFile.load(file.parent)

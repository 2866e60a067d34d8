"""`fresco plan`: the lower bound holds, the choice is the best line, a run's folder is fitted, bad input is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from msgspec import structs

from launch.cli import main
from launch.commands.plan import Candidate, best, candidates, figure_of
from rl.config.schema import Config, load_config
from rollout.simulate.distributions import Constant, Gaussian
from rollout.simulate.recipe import Given, assumed, read_run
from tests.launch.test_memory import EIGHT_B
from tests.test_end_to_end_simulated import finish, start

RECIPE = Path("experiments/simulated.yaml")
MEASURED_ROW = """
time/step: 0.5
time/train: 0.2
time/publish: 0.01
rollout/length: 40.0
rollout/turns: 2.0
rollout/generate_s: 0.3
"""
KNOWN_TIMES = """
rollout.alpha=0
steps=8
eval.tasks=0
tracking.replay=full
env.options.sigma_s=0.02
env.options.mean_s=0.2
env.options.turns=2
env.options.prompt_tokens=30
env.options.observation_tokens=7
generator.options.length_mean=20
generator.options.length_sigma=0
generator.options.decode_base_s=0.01
generator.options.decode_per_seq_s=0
learner.options.step_s=0.3
"""


@pytest.fixture
def config() -> Config:
    return load_config(RECIPE, ["rollout.groups_per_batch=2", "env.options.mean_s=0.05", "env.options.sigma_s=0.02"])


def test_the_best_line_is_best_and_none_beats_the_bound(config: Config) -> None:
    found = candidates(config, assumed(config, Given(train_s=0.05)), gpus=4, alphas=(0.0, 1.0))
    assert {(candidate.generators, candidate.ranks) for candidate in found} == {(3, 1), (2, 2), (1, 3)}
    chosen = best(found)
    assert chosen.result.useful_tokens_per_s >= 0.98 * max(candidate.result.useful_tokens_per_s for candidate in found)
    assert chosen.alpha == 1.0, "asynchrony overlaps training"
    assert any(candidate.redundant for candidate in found)
    assert all(candidate.over_bound >= 1 - 1e-6 for candidate in found)


def test_no_alpha_is_tried_that_the_recipes_staleness_bound_refuses(config: Config) -> None:
    config.rollout.max_staleness = 1
    found = candidates(config, assumed(config, Given(train_s=0.05)), gpus=2, alphas=(0.5, 1.0, 1.5))
    assert {candidate.alpha for candidate in found} == {0.5, 1.0}


def test_the_plot_marks_the_choice_redundancy_and_the_bound(config: Config) -> None:
    found = candidates(config, assumed(config, Given(train_s=0.05)), gpus=3, alphas=(0.0, 1.0))
    chosen = best(found)
    (axis,) = figure_of(found, chosen).axes
    lines = {str(line.get_label()): line for line in axis.lines}
    assert lines["alpha 1, redundant"].get_linestyle() == "--" != lines["alpha 1"].get_linestyle()
    assert [np.asarray(values).tolist() for values in lines["chosen"].get_data()] == [
        [chosen.ranks],
        [chosen.result.useful_tokens_per_s],
    ]
    (bound,) = (line for label, line in lines.items() if label.startswith("bound"))
    place = np.asarray(bound.get_xdata()).tolist().index(chosen.ranks)
    assert np.asarray(bound.get_ydata())[place] > 0.9 * chosen.result.useful_tokens_per_s


@pytest.mark.parametrize("phases", [{"pause": 0.05, "drain": 0.02, "load": 0.02}, {"load": 0.03}])
def test_a_finished_run_is_fitted(tmp_path: Path, config: Config, phases: dict[str, float]) -> None:
    """phases: seconds of an update, of which an engine may tell the load alone."""
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    rows = []
    for step in range(1, 9):
        row: dict[str, float] = yaml.safe_load(MEASURED_ROW)
        row |= {"step": step, "rollout/env_s": 0.1 + 0.01 * (-1) ** step}
        row |= {f"weight_sync/{phase}_mean_s": seconds for phase, seconds in phases.items()}
        for generator in range(2):  # 100 tokens a second in a busy second
            row |= {f"generator.{generator}/tokens": 100.0 * step, f"generator.{generator}/busy_s": 1.0 * step}
        rows.append(json.dumps(row))

    (tmp_path / "metrics.jsonl").write_text("\n".join(rows))
    _, measured = read_run(tmp_path)
    assert measured.train_s == pytest.approx(0.2)
    assert measured.load_s == pytest.approx(0.03)
    assert measured.decode_base_s == pytest.approx(0.3 / 40), "seconds of one token of an episode of 40"
    assert measured.turns == Constant(2)
    assert isinstance(measured.step_s, Gaussian) and measured.step_s.mu == pytest.approx(0.1 / 2, rel=0.02)
    assert any("tokens of prompts" in text for text in measured.guessed), "this run has saved no batches"


def test_a_real_run_is_fitted_to_what_it_was_configured_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Synchronous, of equal turns: a step is turns x (tokens x seconds a token + latency) + training.

    The run takes these times, and longer on a busy machine; that a fit finds the times of its rows is said above.
    """
    tokens = 20  # this and the next as in KNOWN_TIMES
    token_s = 0.01
    env_s = 0.2
    train_s = 0.3
    turns = 2
    finish(start(tmp_path, *KNOWN_TIMES.split()), tmp_path)
    folder = tmp_path / "simulated"
    _, measured = read_run(folder)

    assert (measured.length.mean, measured.turns.mean) == (tokens, turns)
    assert (measured.prompt_tokens, measured.observation_tokens) == (30, 7)
    decode_s = measured.decode_base_s + measured.decode_per_seq_s * 7
    assert isinstance(measured.step_s, Gaussian) and measured.step_s.mean > 0.9 * env_s and measured.step_s.sigma > 0
    assert measured.train_s > 0.9 * train_s and decode_s > 0.85 * token_s
    assert measured.seconds_per_step > 0.9 * (turns * (tokens * token_s + env_s) + train_s)

    assert main(["plan", "--run", str(folder), "--gpus", "2", "--plot", str(tmp_path / "plan.png")]) == 0
    output = capsys.readouterr().out
    assert "30 and 7 tokens of prompt and observation" in output
    assert "assumed, not fitted: environment latency is Gaussian" in output and "KV memory" in output
    predicted = float(output.split("simulated as it was: ")[1].split(" s")[0])
    fitted_s = turns * (tokens * decode_s + measured.step_s.mean) + measured.train_s
    slowest_s = fitted_s + turns * 3 * measured.step_s.sigma  # a batch waits for its slowest episode
    assert 0.85 * fitted_s < predicted < 1.15 * slowest_s


def test_the_command_prints_a_table_and_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["plan", str(RECIPE), "--gpus", "2", "--train-s", "0.05"]
    assert main([*arguments, "rollout.groups_per_batch=2"]) == 0
    output = capsys.readouterr().out
    (best_line,) = [line.removeprefix("best: ") for line in output.splitlines() if line.startswith("best: ")]
    planned = load_config(RECIPE, best_line.split())
    assert (planned.generator.count, planned.learner.ranks) == (1, 1)
    assert "assumed: answers of 24 tokens on average" in output

    (plot,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert plot == tmp_path / "runs" / "plan.png"
    assert plot.stat().st_size > 1000


def test_no_share_of_a_table_is_minus_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums of seconds that fill the whole time exceed it by a rounding error."""
    monkeypatch.chdir(tmp_path)

    def full(*given: Any, **named: Any) -> list[Candidate]:
        found = candidates(*given, **named)
        idle = {"generator_idle": -1e-16, "learner_idle": -1e-16}
        return [structs.replace(each, result=structs.replace(each.result, **idle)) for each in found]

    monkeypatch.setattr("launch.commands.plan.candidates", full)
    assert main(["plan", str(RECIPE), "--gpus", "2", "--train-s", "0.05", "rollout.groups_per_batch=2"]) == 0
    output = capsys.readouterr().out
    assert "generators idle 0%, learner 0%" in output and "-0%" not in output


def test_a_real_recipe_is_not_planned_by_the_simulated_engines_defaults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = ["plan", "math_8gpu", "--gpus", "3", "--plot", str(tmp_path / "plan.png"), "rollout.groups_per_batch=4"]
    assert main(recipe) == 2
    (refused,) = capsys.readouterr().err.splitlines()
    for asked in ("--run", "--train-s", "--env-s", "--decode-s"):
        assert asked in refused

    times = ["--train-s", "20", "--env-s", "0.01,0", "--decode-s", "0.02,0.0001"]
    assert main([*recipe, *times]) == 0
    assert "assumed: answers of 1024 tokens on average" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "needs a recipe"),
        (["--run", "/nowhere"], "metrics.jsonl"),
        ([str(RECIPE), "--env-s", "3"], "--env-s"),
        ([str(RECIPE), "--gpus", "1"], "--gpus"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


@pytest.mark.parametrize("steps", [3, 8])
def test_a_run_without_rollout_has_no_splits(
    tmp_path: Path, config: Config, capsys: pytest.CaptureFixture[str], steps: int
) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    rows = [{"step": step, "time": float(step), "time/step": 1.0, "train/loss": 2.0} for step in range(steps)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["plan", "--run", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert "has 0 training steps with rollout" in error and error.count("\n") == 1


def test_splits_without_the_memory_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 8B on GPUs of 64 GB, whose weights, gradients and optimizer need three ranks."""
    (tmp_path / "config.json").write_text(json.dumps(EIGHT_B | {"model_type": "qwen3"}))
    times = ["--train-s", "30", "--env-s=0.01,0", "--decode-s=0.02,0.0001", "--plot", str(tmp_path / "plan.png")]
    recipe = ["plan", "math_8gpu", f"model.path={tmp_path}", "rollout.groups_per_batch=4", *times]

    assert main([*recipe, "--gpus", "4x64"]) == 0
    told = capsys.readouterr().out
    assert "best: generator.count=1 learner.ranks=3" in told and "KV cache" in told
    assert "left out, generators + ranks 3 + 1: learner.ranks: 1 × learner's GPU" in told

    assert main([*recipe, "--gpus", "4x24"]) == 2
    assert "no split of these GPUs can run this recipe: " in capsys.readouterr().err
    assert main([*recipe, "--gpus", "4"]) == 0
    assert "KV cache" not in capsys.readouterr().out

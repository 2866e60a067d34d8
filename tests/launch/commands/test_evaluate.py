"""`fresco eval` on real processes (simulated engine), its table, and its intervals against closed forms."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from envs.registry import make_family
from launch.cli import main, parse
from launch.commands.evaluate import EpisodeResult, configure, summarise
from launch.report.gather import gather
from rl.config.schema import ConfigError
from rl.observe.intervals import Z95, paired_bootstrap, wilson

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "experiments" / "simulated.yaml"


def cli(*arguments: str) -> str:
    command = [sys.executable, "-m", "launch.cli", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.docs
def test_a_checkpoint_is_evaluated_by_a_run_of_no_steps(tmp_path: Path) -> None:
    cli("run", str(RECIPE), f"runs={tmp_path}", "steps=3", "eval.tasks=8")
    checkpoint = tmp_path / "simulated" / "checkpoints" / "step-3"
    out = tmp_path / "out.json"
    shown = cli("eval", str(checkpoint), "--episodes", "12", "--out", str(out), f"runs={tmp_path}")
    assert "greedy" in shown and "temperature 1" in shown and "95 % interval" in shown

    report = json.loads(out.read_text())
    assert [run["temperature"] for run in report["runs"]] == [0.0, 1.0]
    for run in report["runs"]:
        (row,) = run["rows"]
        assert [episode["task_index"] for episode in run["episodes"]] == list(range(12))
        share = sum(episode["success"] for episode in run["episodes"]) / 12
        assert row["success"] == pytest.approx(share) and row["low"] <= share <= row["high"]

    summary = json.loads((tmp_path / "eval" / "summary.json").read_text())
    assert summary["steps"] == 0 and summary["start_step"] == 3
    assert summary["ledger"]["samples"]["trained"] == 3 * 16  # what the checkpoint had, and nothing more
    versions = {json.loads(line)["version"] for line in (tmp_path / "eval" / "evals.jsonl").read_text().splitlines()}
    assert versions == {3}
    kept = [json.loads(line) for line in (tmp_path / "simulated" / "evals.jsonl").read_text().splitlines()]
    assert {(row["version"], row["task_index"]) for row in kept} == {(n, task) for n in (0, 3) for task in range(8)}


@pytest.mark.docs
def test_checkpoints_are_compared_by_several_samples_of_each_task(tmp_path: Path) -> None:
    sampled = ["eval.samples=3", "eval.temperature=1"]
    cli("run", str(RECIPE), f"runs={tmp_path}", "steps=2", "eval.tasks=4", "learner.checkpoint_every=1", *sampled)
    run = tmp_path / "simulated"
    rows = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    assert [(row["task_index"], row["sample"]) for row in rows[:12]] == [(t, n) for t in range(4) for n in range(3)]
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in metrics if "eval/accuracy" in row][-1]
    assert last["eval/pass@1"] == pytest.approx(last["eval/accuracy"])
    assert last["eval/pass@1"] <= last["eval/pass@2"] <= last["eval/pass@3"]

    told = gather(run).facts["evaluations"][-1]
    assert told["samples"] == 3 and told["all"]["pass@3"][0] == pytest.approx(last["eval/pass@3"])
    assert told["low"] <= told["accuracy"] <= told["high"] and told["accuracy"] == last["eval/accuracy"]

    checkpoints = [str(path) for path in sorted((run / "checkpoints").glob("step-*"))]
    assert len(checkpoints) == 2
    out = tmp_path / "out.json"
    shown = cli("eval", *checkpoints, "--temperature", "1", "eval.samples=2", f"runs={tmp_path}", "--out", str(out))
    assert "all tasks" in shown and "pass@2" in shown
    reports = json.loads(out.read_text())
    assert [report["target"] for report in reports] == checkpoints
    for report in reports:
        (row,) = report["runs"][0]["rows"]
        mean, low, high = row["passed"]["pass@2"]
        assert low <= mean <= high and row["success"] <= mean
        assert row["episodes"] == 2 * len({each["task_index"] for each in report["runs"][0]["episodes"]})


def test_rows_of_a_file_are_the_held_out_tasks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{i}?", "answer": i}) + "\n" for i in range(5)))
    for recipe in ("math_cpu", "simulated"):
        arguments = parse(["eval", "some/model", f"--recipe={recipe}", "--data", str(rows)])
        if recipe == "simulated":
            with pytest.raises(ConfigError, match="env 'synthetic' plays no rows"):
                configure("some/model", arguments)
            continue
        config = configure("some/model", arguments)
        family = make_family(config)
        assert config.eval.tasks == 5 and family.task("eval", 4).question == "4?"


def test_samples_of_one_task_are_one_trial_in_the_table() -> None:
    rows = [EpisodeResult(i % 4, float(i < 2), 0.0, 1, 1, 0, sample=i // 4) for i in range(8)]
    (row,) = summarise(rows)
    assert row.success == pytest.approx((0.5 + 0.5) / 4) and row.episodes == 8
    assert row.passed["pass@2"][0] == pytest.approx(0.5) and (row.low, row.high) != wilson(2, 8)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["no/such/folder/at/all", f"--recipe={RECIPE}", "--episodes=0"], "--episodes 0"),
        (["some/model", f"--recipe={RECIPE}", "--split=valid_unseen"], "no splits"),
        (["some/model"], "--env"),
        (["some/model", "--env=math", "--split=foo"], "--split foo: env.options.source='arithmetic'"),
        (["some/model", "--env=alfworld", "--split=foo"], "env.options.eval_split='foo'"),
        (["some/model", "--env=mathh"], "'mathh' has no recipe"),
        ([str(ROOT / "launch")], "neither a checkpoint"),
        (["some/model", f"--recipe={RECIPE}", "--out=/proc/table.json"], "'/proc/table.json': No such file"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line


def test_temperatures_and_overrides_in_any_order() -> None:
    assert parse(["eval", "m"]).temperatures == (0.0, 1.0)
    assert list(parse(["eval", "m", "--greedy"]).temperatures) == [0.0]
    both = parse(["eval", "m", "a=1", "--temperature", "0.5", "b=2"])
    assert list(both.temperatures) == [0.5] and both.overrides == ["a=1", "b=2"]
    with pytest.raises(SystemExit):
        parse(["eval", "m", "--greedy", "--temperature", "1"])
    with pytest.raises(SystemExit):
        parse(["check-loss", "ppo", "--fast"])


def test_rows_by_type_and_together() -> None:
    episodes = [
        EpisodeResult(i, float(i % 2), 0.0, turns=i, length=2 * i, version=3, label="clean" if i % 3 else "heat")
        for i in range(9)
    ]
    clean, heat, together = summarise(episodes)
    assert (clean.label, clean.episodes, heat.label, heat.episodes) == ("clean", 6, "heat", 3)
    assert together.label == "all" and together.episodes == 9 and together.success == pytest.approx(4 / 9)
    assert [clean.success, heat.success] == pytest.approx([0.5, 1 / 3])
    assert together.turns == 4 and together.length == 8


@pytest.mark.parametrize(("successes", "count"), [(0, 10), (10, 10), (3, 8), (512, 1024)])
def test_wilson_bounds_solve_the_score_equation(successes: int, count: int) -> None:
    share = successes / count
    low, high = wilson(successes, count)
    assert 0 <= low <= share <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(Z95 * math.sqrt(bound * (1 - bound) / count))


def test_wilson_without_a_trial_knows_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_paired_bootstrap_is_tight_where_pairs_agree() -> None:
    before = [float(i % 2) for i in range(400)]
    assert paired_bootstrap(before, before) == (0.0, 0.0, 0.0)
    after = [1.0 if i % 4 == 0 else value for i, value in enumerate(before)]  # a quarter of the tasks improves
    mean, low, high = paired_bootstrap(before, after, draws=2000)
    error = math.sqrt(0.25 * 0.75 / 400)
    assert mean == 0.25 and low == pytest.approx(0.25 - 1.96 * error, abs=0.01)
    assert high == pytest.approx(0.25 + 1.96 * error, abs=0.01)
    with pytest.raises(ValueError, match="same"):
        paired_bootstrap([1.0], [])

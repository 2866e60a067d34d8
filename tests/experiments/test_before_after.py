"""Before and after a run: pairs by task, a real (simulated) run measured, and when every kind of task has gained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from experiments.before_after import gains, main, run_seed, successes

COUNT = 100


def result(words: int, lake: int) -> dict[str, Any]:
    """100 tasks of each of two kinds, of which so many are solved after the run that were not before."""
    before = [0.0] * (2 * COUNT)
    after = [float(index < words) for index in range(COUNT)] + [float(index < lake) for index in range(COUNT)]
    took = {"wall_s": 90.0, "cpu_s": 150.0, "load": 3.0}
    types = ["words"] * COUNT + ["lake"] * COUNT
    return {"seed": 0, "steps": 5, "types": types, "before": before, "after": after} | took


def test_first_and_last_version_are_paired_by_task(tmp_path: Path) -> None:
    rows = [{"version": v, "task_index": t, "success": float(t < v)} for v in (0, 5, 9) for t in (3, 1, 2)]
    (tmp_path / "evals.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    before, after = successes(tmp_path / "evals.jsonl")
    assert before == {1: 0.0, 2: 0.0, 3: 0.0} and after == {1: 1.0, 2: 1.0, 3: 1.0}


def test_every_kind_of_task_has_to_gain_beyond_chance(tmp_path: Path) -> None:
    found = gains(result(words=20, lake=1))
    assert [found[kind][0] for kind in ("all", "words", "lake")] == [0.105, 0.2, 0.01]
    assert found["all"][1] > 0 and found["words"][1] > 0 and found["lake"][1] == 0

    for lake, code in ((1, 1), (20, 0)):
        (tmp_path / "seed-0.json").write_text(json.dumps(result(words=20, lake=lake)))
        assert main(["mixture_cpu", "--out", str(tmp_path)]) == code
    page = (tmp_path / "README.md").read_text()
    assert "| 0 | lake | 100 | 0.0 % (0.0 to 3.7) | 20.0 %" in page and "| 0 | 5 | 1.5 | 2.5 | 3.0 |" in page


def test_a_run_is_measured_from_its_start_to_its_last_evaluation(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "experiments" / "simulated.yaml"
    members = "{quick: {env: synthetic, eval_tasks: 4}, long: {env: synthetic, options: {turns: 2}, eval_tasks: 3}}"
    mixture = ("env.name=mixture", f"env.options={{members: {members}}}", "env.max_turns=2")
    small = ("steps=3", "eval.tasks=7", "tracking.wandb=disabled", "generator.count=1", "env.servers=1")
    found = run_seed(recipe, 5, [*mixture, *small], tmp_path)

    assert (found["seed"], found["steps"], found["freshness_violations"]) == (5, 3, 0)
    assert found["types"] == ["quick", "long"] * 3 + ["quick"] and len(found["before"]) == len(found["after"]) == 7
    assert found["cpu_s"] > 0 and 0 < found["seconds"] <= found["wall_s"]

"""The study of asynchrony in time to score: what its table says of runs whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from experiments.time_to_score.figure import draw
from experiments.time_to_score.report import seconds_to, sooner, table
from experiments.time_to_score.runs import Run, append, overrides, read


def a_run(arm: str, seed: int, step_s: float, steps: int = 100, gain: float = 0.01) -> Run:
    """It gains so much a step, from 0.2 on."""
    return Run(
        task="addition",
        arm=arm,
        seed=seed,
        seconds=[10 + step_s * number for number in range(1, steps + 1)],
        scores=[min(1.0, 0.2 + gain * number) for number in range(steps)],
        samples=[128 * number for number in range(1, steps + 1)],
        cpu_s=1.0,
        others=0.0,
        machine="a test",
    )


def test_a_score_counts_when_five_steps_have_it_on_average() -> None:
    run = a_run("1", 0, step_s=1.0, gain=0.1)
    # Scores 0.2, 0.3, 0.4, 0.5, 0.6: their mean is 0.4 at the fifth step, which ended after 15 seconds.
    assert seconds_to(run, 0.4) == pytest.approx(15.0)
    assert seconds_to(run, 1.01) is None


def test_twice_as_fast_a_step_is_as_much_sooner_as_the_start_allows() -> None:
    runs = [a_run("sync", seed, step_s=1.0, steps=50) for seed in range(3)]
    runs += [a_run("1", seed, step_s=0.5) for seed in range(3)]

    found = sooner(runs, "1")

    # Both need 50 steps to the same score: 10 + 50 seconds against 10 + 25.
    assert found is not None
    assert found.mean == pytest.approx(60 / 35)
    assert found.seeds == 3
    assert found.low <= found.mean <= found.high


def test_a_run_that_never_reaches_the_score_is_said_and_not_averaged_away() -> None:
    runs = [a_run("sync", 0, step_s=1.0, steps=50), a_run("4", 0, step_s=0.5, gain=0.0)]

    found = sooner(runs, "4")

    assert found is not None
    assert math.isnan(found.mean)
    assert "1 of 1 not reached" in str(found)


def test_one_seed_has_no_interval_and_no_pair_has_no_figure() -> None:
    runs = [a_run("sync", 0, step_s=1.0, steps=50), a_run("2", 0, step_s=0.5), a_run("4", 1, step_s=0.5)]

    assert "one seed" in str(sooner(runs, "2"))
    assert sooner(runs, "4") is None


def test_runs_are_read_as_they_were_written_and_make_table_and_curves(tmp_path: Path) -> None:
    for arm in ("2", "sync"):
        append(a_run(arm, 0, step_s=1.0), tmp_path)

    runs = read(tmp_path)
    draw(runs, tmp_path / "curves.png")

    assert runs == [a_run("sync", 0, step_s=1.0), a_run("2", 0, step_s=1.0)]
    assert "| synchronous | 1 | 100 |" in table(runs)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_synchronous_arm_waits_for_every_update_and_may_use_both_cores() -> None:
    assert "rollout.alpha=0" in overrides("sync")
    assert {"generator.threads=2", "learner.threads=2"} <= set(overrides("sync"))
    assert overrides("0.5") == ["rollout.alpha=0.5"]

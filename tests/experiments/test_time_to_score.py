"""The study of asynchrony in time to score: what its table says of runs whose answer is known."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.compare.job import read_lines
from experiments.time_to_score import runs as runs_module
from experiments.time_to_score import tasks as tasks_module
from experiments.time_to_score.figure import draw
from experiments.time_to_score.report import missing, page, to_goal
from experiments.time_to_score.runs import ARMS, SEEDS, Run, append, drawn, overrides, play, read
from experiments.time_to_score.sooner import seconds_to, sooner, verdict
from experiments.time_to_score.tasks import STUDY, Games, Metrics, Setup
from launch.prepare import Prepared
from launch.recipes import find_recipe
from rl.config.schema import Config, load_config

GAMES = Games("alfworld", "alfworld_small", seconds=300, goal=0.5)  # 8 games of 8 samples in a step


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
    assert "| synchronous | 1 | 100 |" in page(runs)
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_synchronous_arm_waits_for_every_update_and_may_use_both_cores() -> None:
    assert "rollout.alpha=0" in overrides("sync")
    assert {"generator.threads=2", "learner.threads=2"} <= set(overrides("sync"))
    assert overrides("0.5") == ["rollout.alpha=0.5"]


# ------------------------------------------------------------ which α is best


def arms_of(seconds: dict[str, tuple[float, ...]]) -> list[Run]:
    """Equal curves over steps: an arm is sooner by its seconds a step, one entry for each seed."""
    return [
        a_run(arm, seed, step_s=each, steps=50 if arm == "sync" else 100)
        for arm, every in seconds.items()
        for seed, each in enumerate(every)
    ]


def test_the_arm_with_the_largest_gain_is_the_best_and_those_it_cannot_be_told_from_are_named() -> None:
    runs = arms_of({"sync": (1, 1, 1), "1": (0.5, 0.51, 0.52), "2": (0.52, 0.53, 0.54), "4": (0.9, 0.9, 0.91)})

    said = verdict(runs)

    # 60 seconds against 10 + 25, 25.5 and 26: logarithms of 0.525 ± 4.303 × 0.0141 / √3.
    assert said.startswith("Best α: α = 1 is soonest: 1.69 × (1.63 to 1.75), which leaves out 1.")
    assert "does not differ from α = 2:" in said
    assert "α = 4" not in said


def test_no_arm_is_called_sooner_when_every_interval_has_1_in_it() -> None:
    said = verdict(arms_of({"sync": (1, 1, 1), "1": (0.5, 1.4, 0.9), "2": (0.8, 1.6, 1.0)}))

    assert said.startswith("Best α: no arm differs from synchronous; the soonest is α = 1")


def test_an_arm_that_is_certain_is_named_beside_a_larger_gain_that_is_not() -> None:
    said = verdict(arms_of({"sync": (1, 1, 1), "1": (0.2, 1.2, 0.3), "2": (0.8, 0.8, 0.81)}))

    assert said.startswith("Best α: α = 1: ")
    assert "no certain gain" in said
    assert "that of α = 2 (" in said


def test_synchronous_training_can_be_the_best() -> None:
    said = verdict(arms_of({"sync": (1, 1, 1), "1": (1.4, 1.41, 1.4), "2": (1.7, 1.7, 1.71)}))

    assert said.startswith("Best α: synchronous is sooner than every arm; the best of them is α = 1")


def test_an_arm_that_missed_the_score_in_a_seed_is_not_the_best_however_soon_it_was_in_the_others() -> None:
    runs = arms_of({"sync": (1, 1, 1), "1": (0.7, 0.7, 0.71), "4": (0.3, 0.3)})
    runs.append(a_run("4", 2, step_s=0.3, gain=0.0))

    assert verdict(runs).startswith("Best α: α = 1 is soonest")
    assert verdict([run for run in runs if run.arm != "1"]) == (
        "Best α: unknown, no arm reached the synchronous score in every seed."
    )


def test_a_missing_seed_is_named_and_an_arm_with_fewer_seeds_is_not_the_best() -> None:
    runs = arms_of({"sync": (1, 1, 1), "1": (0.7, 0.7, 0.71), "2": (0.5, 0.5)})

    assert verdict(runs).startswith("Best α: α = 1 is soonest")
    absent = missing(runs)
    assert absent["addition α = 2"] == [2]
    assert "addition α = 1" not in absent
    count = sum(map(len, absent.values()))
    assert count == len(STUDY) * len(ARMS) * len(SEEDS) - len(runs)
    assert f"{count} runs are missing: addition α = 0.5: seeds 0, 1, 2; addition α = 2: seeds 2; " in page(runs)


def test_without_a_synchronous_run_nothing_is_compared() -> None:
    assert "no arm has a synchronous run of its seed beside it" in verdict([a_run("1", 0, step_s=0.5)])


# ------------------------------------------------------------ what stands beside it


def test_runs_on_a_machine_that_others_used_are_counted_and_marked() -> None:
    runs = arms_of({"sync": (1, 1, 1), "1": (0.5, 0.51, 0.52)})
    runs[4] = replace(runs[4], others=0.31)
    runs[5] = replace(runs[5], others=0.05)  # as much as is allowed

    text = page(runs)

    assert "In 1 of them others used more than 5% of the machine's cores" in text
    assert "addition α = 1 seed 1: 31%" in text
    assert "| α = 1 *1 | 3 | 100 | 1 | 0%, 31%*, 5% |" in text
    assert "| synchronous | 3 |" in text
    assert text.count("a test") == 1  # the machine


def test_seconds_to_a_fixed_score_are_the_median_of_all_seeds_also_of_those_that_never_have_it() -> None:
    fast, slow = a_run("1", 0, step_s=1.0), a_run("1", 1, step_s=2.0)
    never = a_run("1", 2, step_s=1.0, gain=0.0)

    # The fifth mean of 0.2, 0.21, ... is 0.22; 0.5 is reached 28 steps later, with the 33rd step.
    assert to_goal([fast], 0.5) == "43"
    assert to_goal([fast, slow, slow], 0.5) == "76"
    assert to_goal([fast, slow, never], 0.5) == "76 (2 of 3)"
    assert to_goal([fast, never, never], 0.5) == "– (1 of 3)"
    assert to_goal([never], 0.5) == "–"


# ------------------------------------------------------------ the games, and what a run draws


def a_step(number: int, accuracy: float, groups: int, successes: float, **more: float) -> dict[str, float]:
    """A row of the metrics of a run that filters constant groups."""
    return {
        "step": number,
        "time": 1000.0 + number,
        "train/loss": 0.0,
        "rollout/accuracy": accuracy,
        "rollout/reward": accuracy,
        "broker/filtered_groups": groups,
        "broker/filtered_successes": successes,
    } | more


def test_the_score_of_the_games_is_that_before_constant_groups_are_dropped() -> None:
    # 64 trained samples are half won. The 4 groups that were dropped are all lost, then all won, then some of each.
    assert GAMES.score(a_step(1, 0.5, 0, 0)) == pytest.approx(0.5)
    assert GAMES.score(a_step(2, 0.5, 4, 0)) == pytest.approx(32 / 96)
    assert GAMES.score(a_step(3, 0.5, 4, 32)) == pytest.approx(64 / 96)
    assert GAMES.score(a_step(4, 0.5, 4, 8)) == pytest.approx(40 / 96)


def test_every_sample_of_a_metrics_file_is_in_one_step_alone(tmp_path: Path) -> None:
    rows: list[dict[str, float]] = [
        a_step(1, 0.25, 3, 16),
        {"time": 1001.5, "eval/accuracy": 1.0},  # of no step
        a_step(2, 0.75, 1, 0),
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"train/lo')  # the last one is being written

    steps = [row for row in read_lines(path) if "train/loss" in row]
    rolled = [64 + 8 * step["broker/filtered_groups"] for step in steps]
    won = sum(GAMES.score(step) * samples for step, samples in zip(steps, rolled, strict=True))

    assert sum(rolled) == 2 * 64 + 4 * 8
    assert won == pytest.approx(0.25 * 64 + 16 + 0.75 * 64)


def test_what_was_drawn_is_at_least_what_every_state_of_the_ledger_holds() -> None:
    ledger = {"queue/queued": 8, "queue/running": 24, "queue/waiting": 0, "queue/batched": 64}
    ends = {"broker/stale_samples": 16, "broker/filtered_samples": 80, "broker/useful_share": 0.5}

    # Two steps before, of 8 games each, and 192 samples in other states: 24 games.
    assert drawn(GAMES, [a_step(1, 0.5, 0, 0), a_step(2, 0.5, 0, 0), a_step(3, 0.5, 10, 0, **ledger, **ends)]) == 40


def test_steps_that_could_have_drawn_a_game_twice_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Metrics] = [a_step(number, 0.5, 0, 0) for number in range(1, 11)]
    steps[-1] = a_step(10, 0.5, 0, 0, **{"queue/batched": 64})
    monkeypatch.setattr(runs_module, "_watch", lambda *_: (steps, 1000.0, 1.0))

    found = play(_Ready(80), "1", 3)
    assert found.samples == [64 * number for number in range(1, 11)]
    assert found.seconds == [float(number) for number in range(1, 11)]
    assert found.scores == [0.5] * 10

    cut = play(_Ready(79), "1", 3)
    assert cut.seconds == found.seconds[:9] and cut.samples == found.samples[:9] and cut.scores == found.scores[:9]

    # Later steps are left out even where less lies ahead of them than of the first that is.
    steps[5] = a_step(6, 0.5, 0, 0, **{"queue/batched": 64 * 6})
    assert len(play(_Ready(79), "1", 3).scores) == 5

    steps[4] = a_step(5, 0.5, 0, 0, **{"queue/batched": 64 * 6})
    with pytest.raises(SystemExit, match="10 steps in 300 s, 4 of them on new ones of 79 training tasks"):
        play(_Ready(79), "1", 3)


def test_a_run_without_a_single_averaged_score_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [a_step(number, 0.5, 0, 0) for number in range(1, 5)]
    monkeypatch.setattr(runs_module, "_watch", lambda *_: (steps, 1000.0, 1.0))

    with pytest.raises(SystemExit, match="4 steps in 300 s"):
        play(_Ready(4000), "1", 0)


def test_all_runs_of_the_games_have_one_start_model_and_seeds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Family:
        def task_count(self, split: str) -> int:
            return {"train": 4000}[split]

    def prepared(config: Config) -> Prepared:
        made.append(config.seed)
        return Prepared(Path("/models/warm"), 0)

    monkeypatch.setattr(tasks_module, "make_family", lambda _: Family())
    monkeypatch.setattr(tasks_module, "prepare", prepared)
    commands = [GAMES.set_up(tmp_path / "run", seed).command for seed in (0, 7)]

    assert made == [0, 0]
    configs = [load_config(find_recipe(GAMES.recipe), each[5:]) for each in commands]
    assert [config.seed for config in configs] == [0, 7]
    assert {config.model.path for config in configs} == {"/models/warm"}
    assert {config.model.warm_start.demonstrations for config in configs} == {0}
    assert {config.seconds for config in configs} == {300}
    assert {config.eval.tasks for config in configs} == {0}
    assert configs[0].rollout.filter_constant_groups


def test_an_update_does_the_same_in_every_task_of_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "ensure_start_model", lambda _: tmp_path / "model")
    commands = [STUDY[name].set_up(tmp_path / "run", 0).command for name in ("addition", "long")]
    configs = [load_config(find_recipe(each[4]), each[5:]) for each in commands]
    assert {config.generator.on_update for config in configs} == {"recompute"}


class _Ready:
    """The games, of which everything is there."""

    def __init__(self, games: int) -> None:
        self._games = games
        self.name, self.seconds, self.goal = GAMES.name, GAMES.seconds, GAMES.goal
        self.groups, self.group_size = GAMES.groups, GAMES.group_size

    def set_up(self, folder: Path, seed: int) -> Setup:
        return Setup([], self._games)

    def score(self, step: Metrics) -> float:
        return GAMES.score(step)

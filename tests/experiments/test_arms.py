"""Studies of arms and seeds: what their tables say of runs whose answer is known, and what a run leaves in them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from experiments.arms import __main__ as command
from experiments.arms import measures
from experiments.arms import play as play_module
from experiments.arms.__main__ import RESULTS, main
from experiments.arms.measures import Estimate, column, estimate, gained, pairs, seconds_to, sooner
from experiments.arms.page import page
from experiments.arms.play import Metrics, drawn, means_of, play, score_of
from experiments.arms.records import Record, Won, append, check_made_by, missing, read
from experiments.arms.study import START, Cell, Study, StudyError, load
from experiments.compare.tasks import TASKS
from launch.prepare import Prepared
from rl.config.recipes import find_recipe
from rl.config.schema import Config, load_config

STUDIES = sorted((Path(command.__file__).parents[1] / "studies").glob("*.yaml"))
NAMES = [path.stem for path in STUDIES]


def study_of(**fields: object) -> Study:
    """An asynchronous arm beside a synchronous one."""
    arms = {"sync": ["rollout.alpha=0"], "1": ["rollout.alpha=1"], "2": [], "4": []}
    given = {"title": "t", "recipe": "simulated", "arms": arms, "baseline": "sync", "read": ["steps"]}
    return msgspec.convert(given | fields, Study)


def a_run(arm: str, seed: int, step_s: float = 1.0, steps: int = 100, gain: float = 0.01, **more: object) -> Record:
    """It gains so much a step, from 0.2 on."""
    fields = {
        "arm": arm,
        "seed": seed,
        "seconds": [10 + step_s * number for number in range(1, steps + 1)],
        "scores": [min(1.0, 0.2 + gain * number) for number in range(steps)],
        "samples": [128 * number for number in range(1, steps + 1)],
        "cpu_s": 1.0,
        "others": 0.0,
        "machine": "a test",
    }
    return msgspec.convert(fields | more, Record)


# ------------------------------------------------------------ scores over seconds


def test_a_score_counts_when_five_steps_have_it_on_average() -> None:
    run = a_run("1", 0, step_s=1.0, gain=0.1)
    # Scores 0.2, 0.3, 0.4, 0.5, 0.6: their mean is 0.4 at the fifth step, which ended after 15 seconds.
    assert seconds_to(run, 0.4, 5) == pytest.approx(15.0)
    assert seconds_to(run, 1.01, 5) is None


def test_twice_as_fast_a_step_is_as_much_sooner_as_the_start_allows() -> None:
    runs = [a_run("sync", seed, step_s=1.0, steps=50) for seed in range(3)]
    runs += [a_run("1", seed, step_s=0.5) for seed in range(3)]

    found = sooner(runs, "1", study_of())

    # Both need 50 steps to the same score: 10 + 50 seconds against 10 + 25.
    assert found is not None
    assert found.mean == pytest.approx(60 / 35)
    assert found.seeds == 3
    assert found.low <= found.mean <= found.high


def test_the_interval_is_students_over_the_logarithms() -> None:
    runs = [a_run("sync", seed, steps=50) for seed in range(3)]
    runs += [a_run("1", seed, step_s=step_s) for seed, step_s in enumerate((0.5, 0.51, 0.52))]

    # 60 seconds against 10 + 25, 25.5 and 26: logarithms of 0.525 ± 4.303 × 0.0141 / √3.
    assert str(sooner(runs, "1", study_of())) == "1.69 × (1.63 to 1.75)"


def test_a_run_that_never_reaches_the_score_is_said_and_not_averaged_away() -> None:
    runs = [a_run("sync", 0, step_s=1.0, steps=50), a_run("4", 0, step_s=0.5, gain=0.0)]

    found = sooner(runs, "4", study_of())

    assert found is not None
    assert math.isnan(found.mean)
    assert str(found) == "–, 1 of 1 not reached"


def test_one_seed_has_no_interval_and_no_pair_has_no_figure() -> None:
    runs = [a_run("sync", 0, step_s=1.0, steps=50), a_run("2", 0, step_s=0.5), a_run("4", 1, step_s=0.5)]

    assert "one seed" in str(sooner(runs, "2", study_of()))
    assert sooner(runs, "4", study_of()) is None


def test_seconds_to_a_goal_are_the_median_of_all_seeds_also_of_those_that_never_have_it() -> None:
    fast, slow = a_run("1", 0, step_s=1.0), a_run("1", 1, step_s=2.0)
    never = a_run("1", 2, step_s=1.0, gain=0.0)

    def told(*runs: Record) -> str:
        return column(study_of(goal=0.5), "seconds to goal", runs, runs)

    # The fifth mean of 0.2, 0.21, ... is 0.22; 0.5 is reached 28 steps later, with the 33rd step.
    assert told(fast) == "43"
    assert told(fast, slow, slow) == "76"
    assert told(fast, slow, never) == "76 (2 of 3)"
    assert told(fast, never, never) == "– (1 of 3)"
    assert told(never) == "–"


def test_training_to_a_goal_leaves_out_what_came_before_the_first_score() -> None:
    late = a_run("1", 0, step_s=1.0)
    since_the_first = column(study_of(goal=0.5), "training to goal", [late], [late])
    assert float(since_the_first) == 43 - late.seconds[0]


def test_intervals_are_students() -> None:
    of_three = estimate([1.0, 2.0, 3.0])
    assert of_three == Estimate(2.0, of_three.half_width, 3)
    assert of_three.half_width == pytest.approx(2.4843, abs=1e-3)
    assert estimate([0.5]).half_width == math.inf
    with pytest.raises(ValueError, match="no runs"):
        estimate([])


def test_final_accuracy_is_the_mean_of_the_last_evaluations_and_means_leave_out_the_first_quarter() -> None:
    record = Record(arm="1", seed=1, accuracy={"0": 0.3, "12": 0.9, "4": 0.7, "8": 0.8})
    assert measures.final_accuracy(record, 3) == pytest.approx(0.8)
    rows = [{"loss/ess": float(value)} for value in (0, 1, 2, 3, 4, 4, 4, 4)]
    assert means_of(study_of(means={"ess": "loss/ess"}), rows) == {"ess": pytest.approx(21 / 6)}


# ------------------------------------------------------------ evaluated tasks


def won(clean: int, heat: int, count: int = 100) -> Won:
    """100 games of each of two kinds, of which the first ones are won."""
    return {"clean": "1" * clean + "0" * (count - clean), "heat": "1" * heat + "0" * (count - heat)}


def test_tasks_are_paired_by_kind_and_left_out_where_one_side_has_no_answer() -> None:
    before = {"clean": "10-1", "heat": "00"}
    after = {"clean": "-101", "heat": "10"}
    assert pairs(before, after, "clean") == ([0, 1], [1, 1])
    assert pairs(before, after) == ([0, 1, 0, 0], [1, 1, 1, 0])
    with pytest.raises(ValueError, match="shorter"):  # not the same games
        pairs(before, {"clean": "1", "heat": "00"}, "clean")


def evaluated(recipe: Won) -> tuple[Study, list[Record]]:
    """Seed 0, sampled: the start model, the recipe and one control."""
    arms: dict[str, list[str]] = {"recipe": [], "entropy": ["algo.entropy_coef=0.1"], "synchronous": []}
    study = study_of(arms=arms, baseline="recipe", seeds=[0, 1], evaluate={"sampled": [], "greedy": []})
    found = [
        Record(arm=START, seed=0, how="sampled", won=won(30, 30)),
        a_run("recipe", 0, steps=90),
        Record(arm="recipe", seed=0, how="sampled", won=recipe),
        Record(arm="entropy", seed=0, how="sampled", won=won(35, 35)),
    ]
    return study, found


def test_the_table_is_that_of_the_runs_that_are_there() -> None:
    study, records = evaluated(won(55, 40))
    text = page(study, records, "a command")
    lines = text.splitlines()

    whole = "| sampled | recipe | 0 | all | 200 | 30.0 % (24.1 to 36.7) | 47.5 % (40.7 to 54.4) | +17.5 ("
    assert any(line.startswith(whole) for line in lines)
    assert any(line.startswith("| sampled | recipe | 0 | heat | 100 | 30.0 %") and "+10.0 (" in line for line in lines)
    (control,) = [line for line in lines if line.startswith("| sampled | entropy | 0 | all | 200 | 47.5 %")]
    assert "35.0 %" in control and "-12.5 (" in control, "the recipe stands beside it"
    assert "| recipe | 0 | 90 |" in lines

    (absent,) = [line for line in lines if line.startswith("Missing are")]
    assert absent.startswith("Missing are 18 runs: start, seed 0, greedy;")
    assert "recipe, seed 1;" in absent and "recipe, seed 0, sampled" not in absent
    assert gained(records, 0, "recipe", "greedy") is None


def test_every_kind_of_task_has_its_own_gain() -> None:
    records = [
        Record(arm=START, seed=0, how="held-out", won=won(0, 0)),
        Record(arm="recipe", seed=0, how="held-out", won=won(20, 1)),
    ]
    found = {kind: gained(records, 0, "recipe", "held-out", kind=kind) for kind in ("all", "clean", "heat")}
    assert {kind: gain[0] for kind, gain in found.items() if gain} == {"all": 0.105, "clean": 0.2, "heat": 0.01}
    assert found["all"] and found["all"][1] > 0 and found["heat"] and found["heat"][1] == 0


def test_runs_on_a_machine_that_others_used_are_counted_and_marked() -> None:
    study = study_of(read=["steps", "cpu_s", "others"], seeds=[0, 1, 2])
    shares = (0.0, 0.31, 0.05)  # the last is as much as is allowed
    runs = [a_run("1", seed, others=share) for seed, share in enumerate(shares)]

    text = page(study, runs, "a command")

    assert "In 1 of them others used more than 5% of its cores (*): 1, seed 1: 31%." in text
    assert "| 1 | 0, 1, 2 | 100, 100, 100 | 1, 1, 1 | 0%, 31%*, 5% |" in text
    assert text.count("a test") == 1  # the machine


# ------------------------------------------------------------ the files


def test_runs_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "runs.jsonl"
    assert read(path) == []
    for arm in ("2", "sync"):
        append(path, a_run(arm, 0))
    with path.open("a") as file:
        file.write('{"arm": "4", "se')  # the last one is being written
    assert read(path) == [a_run("2", 0), a_run("sync", 0)]


def test_what_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Cell] = []

    def fake(study: Study, cell: Cell, _runs: Path) -> Record:
        played.append(cell)
        if len(played) == 3:
            raise KeyboardInterrupt
        kept = {"won": won(60, 60)} if cell.how else {"facts": {"steps": 9}}
        return msgspec.convert({"arm": cell.arm, "seed": cell.seed, "how": cell.how} | kept, Record)

    monkeypatch.setattr(command, "play", fake)
    monkeypatch.setattr(command, "check_made_by", lambda *_: None)
    file = tmp_path / "s.yaml"
    file.write_text("{title: t, recipe: simulated, arms: {one: [], two: []}, evaluate: {sampled: []}, read: [steps]}")
    arguments = [str(file), "--out", str(tmp_path)]

    main([*arguments, "--table"])
    assert not played
    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    main(arguments)
    wanted = load(file).cells()
    assert played == [*wanted[:3], *wanted[2:]], "the third one was interrupted"
    assert "Missing" not in (tmp_path / "README.md").read_text()


def test_no_run_begins_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "play", lambda *_: pytest.fail("a run began"))
    file = tmp_path / "s.yaml"
    file.write_text("{title: t, recipe: simulated, arms: {one: []}, read: [steps]}")
    main([str(file), "--out", str(tmp_path), "--minutes", "-1"])


def test_runs_of_another_recipe_are_refused_but_a_start_is_shared(tmp_path: Path) -> None:
    study = study_of(evaluate={"sampled": []})
    cells = [Cell(START, 0, "sampled"), Cell("1", 0)]
    records = [Record(arm=cell.arm, seed=0, how=cell.how, made_by=study.made_by(cell)) for cell in cells]
    check_made_by(study, records, tmp_path)

    other = study_of(evaluate={"sampled": []}, set=["learner.lr=2e-6"])
    check_made_by(other, records[:1], tmp_path)
    with pytest.raises(StudyError, match=r"1, seed 0 was made by another recipe .* name another folder with --out"):
        check_made_by(other, records, tmp_path)
    with pytest.raises(StudyError, match="start, seed 0, sampled"):
        check_made_by(study_of(evaluate={"sampled": []}, set=["sampling.max_tokens=9"]), records, tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{title: t, recipe: simulated, arm: {}, read: []}", "unknown field `arm`"),
        ("{title: t, recipe: simulated, task: addition, arms: {a: []}, read: []}", "recipe or task"),
        ("{title: t, recipe: simulated, read: []}", "without an arm"),
        ("{title: t, recipe: simulated, arms: {a: []}, baseline: b, read: []}", "baseline='b' is no arm"),
        ("[", "s.yaml"),
    ],
)
def test_a_bad_study_is_refused_in_one_line(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "s.yaml"
    file.write_text(text)
    with pytest.raises(StudyError, match=said):
        load(file)


# ------------------------------------------------------------ the studies of the repository


@pytest.mark.parametrize("path", STUDIES, ids=NAMES)
def test_every_arm_of_a_study_is_a_configuration(path: Path) -> None:
    study = load(path)
    for arm in study.every_arm:
        study.config_of(arm, [*(each for changes in study.evaluate.values() for each in changes)])
    assert not study.task or study.task in TASKS


@pytest.mark.parametrize("path", STUDIES, ids=NAMES)
def test_the_page_of_a_study_is_that_of_its_runs(path: Path) -> None:
    kept = RESULTS / path.stem
    if not (kept / "runs.jsonl").exists():
        pytest.skip("no run of this study is kept")
    records = read(kept / "runs.jsonl")
    assert not missing(load(path), records)
    text = page(load(path), records, f"python -m experiments.arms experiments/studies/{path.name}")
    assert (kept / "README.md").read_text() == text, f"make it: python -m experiments.arms {path} --table"


def test_a_grid_is_every_combination_and_a_lag_is_no_field() -> None:
    study = study_of(arms={}, baseline="", grid={"algo.loss": ["grpo", "topr"], "lag": [0, 4]})
    assert list(study.every_arm) == ["loss grpo, lag 0", "loss grpo, lag 4", "loss topr, lag 0", "loss topr, lag 4"]
    assert study.every_arm["loss topr, lag 4"].lag == 4
    assert study.every_arm["loss topr, lag 4"].set == ["algo.loss=topr"]


def test_the_controls_of_alfworld_differ_from_the_recipe_in_one_thing() -> None:
    study = load(RESULTS.parent / "studies" / "alfworld.yaml")
    recipe = study.config_of("recipe").model_dump()
    for arm, (section, field) in {"entropy": ("algo", "shaping"), "synchronous": ("rollout", "alpha")}.items():
        control = study.config_of(arm).model_dump()
        assert control[section].pop(field) != recipe[section][field]
        assert control == recipe | {section: {key: value for key, value in recipe[section].items() if key != field}}


@pytest.mark.parametrize("name", ["addition", "long_tail", "small_games"])
def test_synchronous_training_waits_for_every_update_and_may_use_both_cores(name: str) -> None:
    study = load(RESULTS.parent / "studies" / f"{name}.yaml")
    config = study.config_of("synchronous")
    assert (config.rollout.alpha, config.generator.threads, config.learner.threads) == (0, 2, 2)
    assert study.config_of("α = 0.5").rollout.alpha == 0.5
    assert study.every_arm["α = 0.5"].set == ["rollout.alpha=0.5"], "arms differ in α alone"


# ------------------------------------------------------------ what a run draws, and what is kept of it

GAMES = load(RESULTS.parent / "studies" / "small_games.yaml")  # 8 games of 8 samples in a step
CONFIG = GAMES.config_of("α = 1")


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


def score(row: Metrics) -> float:
    return score_of(GAMES, CONFIG, row)


def test_the_score_of_games_is_that_before_constant_groups_are_dropped() -> None:
    # 64 trained samples are half won. The 4 groups that were dropped are all lost, then all won, then some of each.
    assert score(a_step(1, 0.5, 0, 0)) == pytest.approx(0.5)
    assert score(a_step(2, 0.5, 4, 0)) == pytest.approx(32 / 96)
    assert score(a_step(3, 0.5, 4, 32)) == pytest.approx(64 / 96)
    assert score(a_step(4, 0.5, 4, 8)) == pytest.approx(40 / 96)


def test_every_sample_of_a_run_is_in_one_step_alone() -> None:
    rows: list[Metrics] = [a_step(1, 0.25, 3, 16), {"time": 1001.5, "step": 1, "eval/accuracy": 1.0}]
    rows.append(a_step(2, 0.75, 1, 0))
    record = Record(arm="α = 1", seed=0)
    study = msgspec.structs.replace(GAMES, window=1)
    play_module._add_steps(record, study, CONFIG, rows, 1000.0, None)

    rolled = [64 + 8 * 3, 64 + 8 * 1]
    total = sum(value * samples for value, samples in zip(record.scores, rolled, strict=True))
    assert total == pytest.approx(0.25 * 64 + 16 + 0.75 * 64, abs=1e-3)
    assert record.accuracy == {"1": 1.0} and record.samples == [64, 128] and record.seconds == [1.0, 2.0]


def test_a_score_may_be_that_of_the_evaluations() -> None:
    rows: list[Metrics] = [
        {"time": 1000.5, "step": 0, "eval/accuracy": 0.25},
        a_step(1, 0.5, 0, 0),
        a_step(2, 0.5, 0, 0),
    ]
    rows.append({"time": 1002.5, "step": 2, "eval/accuracy": 0.75})
    record = Record(arm="taught", seed=0)
    study = msgspec.structs.replace(GAMES, window=1, score="eval/accuracy")
    play_module._add_steps(record, study, CONFIG, rows, 1000.0, None)
    assert (record.scores, record.seconds) == ([0.25, 0.75], [0.5, 2.5])
    assert record.samples == [0, 2 * 64] and seconds_to(record, 0.7, 1) == 2.5


def test_what_was_drawn_is_at_least_what_every_state_of_the_ledger_holds() -> None:
    ledger = {"queue/queued": 8, "queue/running": 24, "queue/waiting": 0, "queue/batched": 64}
    ends = {"broker/stale_samples": 16, "broker/filtered_samples": 80, "broker/useful_share": 0.5}

    # Two steps before, of 8 games each, and 192 samples in other states: 24 games.
    last = a_step(3, 0.5, 10, 0, **ledger, **ends)
    assert drawn(CONFIG, [a_step(1, 0.5, 0, 0), a_step(2, 0.5, 0, 0), last]) == 40


def kept_of(steps: list[Metrics], tasks: int) -> Record:
    record = Record(arm="α = 1", seed=3)
    play_module._add_steps(record, GAMES, CONFIG, steps, 1000.0, tasks)
    return record


def test_steps_that_could_have_drawn_a_game_twice_are_left_out() -> None:
    steps: list[Metrics] = [a_step(number, 0.5, 0, 0) for number in range(1, 11)]
    steps[-1] = a_step(10, 0.5, 0, 0, **{"queue/batched": 64})

    found = kept_of(steps, 80)
    assert found.samples == [64 * number for number in range(1, 11)]
    assert found.seconds == [float(number) for number in range(1, 11)]
    assert found.scores == [0.5] * 10

    cut = kept_of(steps, 79)
    assert cut.seconds == found.seconds[:9] and cut.samples == found.samples[:9] and cut.scores == found.scores[:9]

    # Later steps are left out even where less lies ahead of them than of the first that is.
    steps[5] = a_step(6, 0.5, 0, 0, **{"queue/batched": 64 * 6})
    assert len(kept_of(steps, 79).scores) == 5

    steps[4] = a_step(5, 0.5, 0, 0, **{"queue/batched": 64 * 6})
    with pytest.raises(StudyError, match="4 steps on new tasks of 79: a score is the mean of 5"):
        kept_of(steps, 79)


def test_all_runs_with_the_same_start_have_one_model_and_seeds_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def prepared(config: Config) -> Prepared:
        made.append(config.seed)
        return Prepared(Path("/models/warm"), 0)

    monkeypatch.setattr(play_module, "prepare", prepared)
    configs = [load_config(find_recipe(GAMES.recipe), changes(GAMES, Cell("α = 2", seed), tmp_path)) for seed in (0, 7)]

    assert made == [0, 0]
    assert [config.seed for config in configs] == [0, 7]
    assert {config.model.path for config in configs} == {"/models/warm"}
    assert {config.model.warm_start.demonstrations for config in configs} == {0}
    assert {config.seconds for config in configs} == {300}
    assert {config.eval.tasks for config in configs} == {0}
    assert configs[0].rollout.filter_constant_groups


def test_an_update_does_the_same_in_every_task_of_arithmetic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(play_module, "ensure_start_model", lambda _: tmp_path / "model")
    for name, lr in (("addition", 3e-4), ("long_tail", 2e-4)):
        study = load(RESULTS.parent / "studies" / f"{name}.yaml")
        config = load_config(study.recipe_of("α = 2"), changes(study, Cell("α = 2", 5), tmp_path))
        assert (config.generator.on_update, config.learner.lr, config.seed) == ("recompute", lr, 5)
        assert config.rollout.alpha == 2, "the arm's, not that of the comparison with other trainers"
        assert Path(config.env.options["source"]).exists()


def changes(study: Study, cell: Cell, folder: Path) -> list[str]:
    """All overrides of a run, as its command has them."""
    given = play_module._given(study, cell, folder / "run")
    return [*given, *study.changes_of(cell.arm), *play_module._ends(study, cell, folder / "run")]


# ------------------------------------------------------------ real (simulated) runs

SMALL = ["tracking.wandb=disabled", "generator.count=1", "env.servers=1"]


@pytest.mark.docs
def test_a_real_study_of_simulated_runs(tmp_path: Path) -> None:
    """Every run by itself: an evaluation continues from the checkpoint of its training run."""
    file = tmp_path / "small.yaml"
    fields = {
        "title": "t",
        "recipe": "simulated",
        "set": ["seconds=1", "steps=1000", *SMALL],
        "arms": {"recipe": []},
        "seeds": [3],
        "evaluate": {"sampled": ["eval.tasks=6"], "greedy": ["eval.tasks=6", "eval.temperature=0"]},
        "read": ["steps", "violations", "staleness"],
    }
    file.write_text(json.dumps(fields))
    arguments = [str(file), "--out", str(tmp_path / "made"), "--runs", str(tmp_path / "runs")]
    main(arguments)

    records = {str(record.cell): record for record in read(tmp_path / "made" / "runs.jsonl")}
    trained = records["recipe, seed 3"]
    assert trained.facts["steps"] >= 1 and trained.facts["violations"] == 0 and trained.cpu_s and trained.cpu_s > 0
    for name in ("start, seed 3", "recipe, seed 3"):
        for how in ("sampled", "greedy"):
            told = records[f"{name}, {how}"].won["all"]
            assert len(told) == 6 and set(told) <= {"0", "1"}
    text = (tmp_path / "made" / "README.md").read_text()
    assert "Missing" not in text and "| sampled | recipe | 3 | all | 6 |" in text

    study = load(file)
    with pytest.raises(StudyError, match=r"recipe\.seed-3 has no checkpoint to evaluate: name its folder with --runs"):
        play(study, Cell("recipe", 3, "greedy"), tmp_path / "elsewhere")


def test_tasks_of_a_mixture_are_told_by_kind(tmp_path: Path) -> None:
    members = "{quick: {env: synthetic, eval_tasks: 4}, long: {env: synthetic, options: {turns: 2}, eval_tasks: 3}}"
    mixture = ["env.name=mixture", f"env.options={{members: {members}}}", "env.max_turns=2"]
    study = study_of(set=[*mixture, *SMALL], evaluate={"sampled": ["eval.tasks=7"]})
    found = play(study, Cell(START, 5, "sampled"), tmp_path)
    assert {kind: len(told) for kind, told in found.won.items()} == {"quick": 4, "long": 3}


def test_a_run_that_fails_is_no_result(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="it ended with"):
        play(study_of(set=["env.options.turns=0"]), Cell("1", 0), tmp_path)


def test_one_process_is_an_arm_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is not finite is a result; what was trained before it is kept."""
    from experiments import plain_loop

    rows: list[Mapping[str, float]] = [
        {"step": 0.0, "eval/greedy": 0.3, "reward/mean": 0.25, "loss/ess": 1.0},
        {"step": 1.0, "reward/mean": 0.5, "loss/ess": 0.5},
    ]
    lags: list[int] = []

    def run(_loop: object, lag: int) -> object:
        lags.append(lag)
        yield from rows
        raise FloatingPointError("the gradient norm of step 2 is nan")

    monkeypatch.setattr(plain_loop, "run", run)
    monkeypatch.setattr(plain_loop, "PlainLoop", lambda *_: None)
    monkeypatch.setattr(plain_loop, "model_folder", lambda _: Path())
    study = study_of(
        recipe="math_cpu", loop="plain", arms={}, baseline="", grid={"lag": [4]}, means={"ess": "loss/ess"}
    )
    found = play(study, Cell("lag 4", 2), Path())

    assert lags == [4] and found.ended == "step 2: the gradient norm of step 2 is nan"
    assert found.accuracy == {"0": 0.3} and found.scores == [0.25, 0.5] and found.facts == {"ess": 0.75}

"""The study's cells and table: pairs by game and type, what is missing, no cell twice, and a real run of all of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments import alfworld_study
from experiments.alfworld_study import Cell, Study, StudyError, Won, cells, gained, main, page, pairs, reached
from experiments.before_after import RESULTS
from rl.config.schema import load_config

EXPERIMENTS = Path(alfworld_study.__file__).parent
TRAINED = {
    "steps": 90,
    "training_s": 1203.5,
    "trained": {"samples": 5760, "tokens": 200_000},
    "useful_share": 0.5,
    "staleness": 0.75,
    "freshness_violations": 0,
    "wall_s": 1290.0,
    "cpu_s": 2400.0,
    "load": 2.5,
    "machine": "a laptop",
}


def won(clean: int, heat: int, count: int = 100) -> Won:
    """100 games of each of two types, the first ones won."""
    return {"clean": "1" * clean + "0" * (count - clean), "heat": "1" * heat + "0" * (count - heat)}


def study(folder: Path) -> Study:
    return Study(EXPERIMENTS / "alfworld_cpu.yaml", folder, folder / "runs", 200)


def put(made: Study, cell: Cell, content: dict[str, object]) -> None:
    made.file(cell).write_text(json.dumps(content | {"recipe": made.made_by(cell)}))


def filled(folder: Path, recipe: Won) -> Study:
    """Seed 0, at temperature 1: the warm start, the recipe and one control."""
    made = study(folder)
    put(made, Cell(0, "warm", "sampled"), {"won": won(30, 30)})
    put(made, Cell(0, "recipe"), TRAINED)
    put(made, Cell(0, "recipe", "sampled"), {"won": recipe})
    put(made, Cell(0, "entropy", "sampled"), {"won": won(35, 35)})
    return made


def test_the_goal_is_fifteen_points_and_an_interval_above_zero(tmp_path: Path) -> None:
    assert reached(filled(tmp_path, won(50, 40)), 0)
    assert not reached(filled(tmp_path, won(50, 39)), 0)
    assert not reached(study(tmp_path), 1)  # not played yet


def test_games_are_paired_by_type_and_left_out_where_one_side_has_no_answer() -> None:
    before = {"clean": "10-1", "heat": "00"}
    after = {"clean": "-101", "heat": "10"}
    assert pairs(before, after, "clean") == ([0, 1], [1, 1])
    assert pairs(before, after, "all") == ([0, 1, 0, 0], [1, 1, 1, 0])
    with pytest.raises(ValueError, match="shorter"):  # not the same games
        pairs(before, {"clean": "1", "heat": "00"}, "clean")


def test_the_table_is_that_of_the_cells_that_are_there(tmp_path: Path) -> None:
    made = filled(tmp_path, won(55, 40))
    text = page(made, [0, 1], ["recipe", "entropy", "synchronous"])
    lines = text.splitlines()

    (whole,) = [line for line in lines if line.startswith("| sampled | recipe | 0 | all ")]
    assert whole.startswith(
        "| sampled | recipe | 0 | all | 200 | 30.0 % (24.1 to 36.7) | 47.5 % (40.7 to 54.4) | +17.5 ("
    )
    assert any(line.startswith("| sampled | recipe | 0 | heat | 100 | 30.0 %") and "+10.0 (" in line for line in lines)
    (control,) = [line for line in lines if line.startswith("| sampled | entropy | 0 | all | 200 | 35.0 %")]
    assert "47.5 %" in control and "+12.5 (" in control  # the recipe beside it
    assert "| recipe | 0 | 1203.5 | 90 | 5760 | 200000 | 0.50 | 0.75 | 21.5 | 40.0 | 2.5 | a laptop |" in lines

    (missing,) = [line for line in lines if line.startswith("Cells that are missing")]
    assert (
        "`seed-0.warm.greedy`" in missing and "`seed-1.recipe`" in missing and "`seed-0.recipe.sampled`" not in missing
    )
    assert missing.count("`") // 2 == 2 * 11 - 4
    assert gained(made, 0, "recipe", "greedy") is None


def test_a_cell_that_is_there_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    played: list[Cell] = []

    def play(self: Study, cell: Cell) -> dict[str, object]:
        played.append(cell)
        if len(played) == 3:
            raise KeyboardInterrupt
        return ({"won": won(60, 60)} if cell.how else TRAINED) | {"recipe": self.made_by(cell)}

    monkeypatch.setattr(Study, "play", play)
    filled(tmp_path, won(50, 50))
    arguments = ["--seeds", "0", "--results", str(tmp_path), "--runs", str(tmp_path / "runs")]
    assert main([*arguments, "--table"]) == 0 and not played

    with pytest.raises(KeyboardInterrupt):
        main(arguments)
    assert main(arguments) == 0
    there = [Cell(0, "warm", "sampled"), Cell(0, "recipe"), Cell(0, "recipe", "sampled"), Cell(0, "entropy", "sampled")]
    wanted = [cell for cell in cells([0], list(alfworld_study.ARMS)) if cell not in there]
    assert played == [*wanted[:3], *wanted[2:]]  # the third one was interrupted
    assert "No cell is missing." in (tmp_path / "README.md").read_text()


def test_cells_of_another_recipe_are_refused_but_a_warm_start_is_shared(tmp_path: Path) -> None:
    filled(tmp_path, won(50, 50))
    other = Study(EXPERIMENTS / "alfworld_cpu.yaml", tmp_path, tmp_path / "runs", 200, ("rollout.alpha=2",))
    assert other.won(Cell(0, "warm", "sampled")) == won(30, 30)
    with pytest.raises(StudyError, match=r"seed-0\.recipe\.sampled\.json was made by another recipe"):
        other.won(Cell(0, "recipe", "sampled"))

    larger = Study(EXPERIMENTS / "alfworld_cpu.yaml", tmp_path, tmp_path / "runs", 200, ("model.tiny.layers=5",))
    with pytest.raises(StudyError, match=r"seed-0\.warm\.sampled\.json"):
        larger.won(Cell(0, "warm", "sampled"))


def test_the_cells_of_the_repository_are_of_the_recipe_beside_them(tmp_path: Path) -> None:
    """A field that Fresco got later, and that has its default, has refused all of them once."""
    kept = Study(EXPERIMENTS / "alfworld_cpu.yaml", RESULTS / "alfworld", tmp_path, 1024)
    read = [kept.read(cell) for cell in cells([0, 1, 2], list(alfworld_study.ARMS))]
    assert sum(cell is not None for cell in read) >= 21


def test_the_controls_differ_from_the_recipe_in_one_thing() -> None:
    recipe = load_config(EXPERIMENTS / "alfworld_cpu.yaml").model_dump()
    for arm, (section, field) in {"entropy": ("algo", "shaping"), "synchronous": ("rollout", "alpha")}.items():
        control = load_config(EXPERIMENTS / "alfworld_cpu.yaml", list(alfworld_study.ARMS[arm])).model_dump()
        assert control[section].pop(field) != recipe[section][field]
        assert control == recipe | {section: {key: value for key, value in recipe[section].items() if key != field}}


def test_a_real_study_of_simulated_runs(tmp_path: Path) -> None:
    """Every cell by its own run: the evaluation continues from the training run's checkpoint."""
    made = tmp_path / "results"
    arguments = ["--seeds", "3", "--arms", "recipe", "--recipe", "simulated", "--episodes", "6", "--results", str(made)]
    small = ["seconds=1", "steps=1000", "tracking.wandb=disabled", "generator.count=1", "env.servers=1"]
    assert main([*arguments, "--runs", str(tmp_path / "runs"), *small]) in (0, 1)

    trained = json.loads((made / "seed-3.recipe.json").read_text())
    assert trained["steps"] >= 1 and trained["training_s"] >= 1 and trained["freshness_violations"] == 0
    for name in ("warm.sampled", "warm.greedy", "recipe.sampled", "recipe.greedy"):
        cell = json.loads((made / f"seed-3.{name}.json").read_text())
        assert len(cell["won"]["all"]) == 6 and set(cell["won"]["all"]) <= {"0", "1"} and cell["cpu_s"] > 0
    text = (made / "README.md").read_text()
    assert "No cell is missing." in text and "| sampled | recipe | 3 | all | 6 |" in text

    (made / "seed-3.recipe.greedy.json").unlink()
    lost = Study(EXPERIMENTS / "simulated.yaml", made, tmp_path / "elsewhere", 6)
    with pytest.raises(StudyError, match=r"seed-3\.recipe has no checkpoint: remove .*seed-3\.recipe\.json"):
        lost.play(Cell(3, "recipe", "greedy"))

"""The three-seed table: pairs by game, intervals, and when the goal counts as reached."""

from __future__ import annotations

import json
from pathlib import Path

from experiments.alfworld_seeds import main, reached
from experiments.before_after import table

COUNT = 200


def result(seed: int, gained: int) -> dict[str, object]:
    before = [1.0] * 60 + [0.0] * (COUNT - 60)
    after = [1.0] * (60 + gained) + [0.0] * (COUNT - 60 - gained)
    types = ["clean" if index % 2 else "heat" for index in range(COUNT)]

    return {
        "seed": seed,
        "steps": 5,
        "seconds": 1.0,
        "freshness_violations": 0,
        "types": types,
        "before": before,
        "after": after,
    }


def test_the_goal_is_fifteen_points_and_an_interval_above_zero() -> None:
    assert reached(result(0, 40)) and not reached(result(0, 28)) and not reached(result(0, 0))


def test_the_table_has_every_type_and_existing_seeds_are_not_run_again(tmp_path: Path) -> None:
    for seed, gained in ((0, 40), (1, 44)):
        (tmp_path / f"seed-{seed}.json").write_text(json.dumps(result(seed, gained)))
    assert main(["--seeds", "0", "1", "--results", str(tmp_path)]) == 0
    lines = (tmp_path / "README.md").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("| 0 | all")]
    assert line.startswith("| 0 | all | 200 | 30.0 % (24.1 to 36.7) | 50.0 %") and "+20.0 (" in line
    assert sum("| clean | 100 |" in line for line in lines) == 2

    (tmp_path / "seed-2.json").write_text(json.dumps(result(2, 3)))
    assert main(["--seeds", "0", "1", "2", "--results", str(tmp_path)]) == 1


def test_a_table_of_one_seed() -> None:
    assert len(table([result(0, 40)]).splitlines()) == 2 + 3

"""What is told of a folder of games, against the recipe that made them and the games themselves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.alfworld.describe import describe, main, played
from envs.alfworld.games import GameRecipe, ensure_games, list_games

RECIPE = GameRecipe(train=6, valid_unseen=6, max_receptacles=7, clutter=(4, 8), seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_games(RECIPE, tmp_path_factory.mktemp("alfworld") / "games", workers=1)


def test_sizes_are_those_of_the_recipe_and_the_walkthroughs(folder: Path) -> None:
    split = describe(folder, "train")
    assert max(split.receptacles) == 7 and all(4 <= count <= 12 for count in split.objects)
    assert set(split.types.values()) == {1} and len(split.types) == 6
    assert not split.scenes & describe(folder, "valid_unseen").scenes
    assert all(any(goal.startswith(kind) for kind in split.types) for goal in split.goals)

    first = json.loads(list_games(folder, "train")[0].path.read_text())
    assert split.commands[0] == len(first["walkthrough"]) > 0


def test_the_demonstrator_wins_within_the_turns_that_it_is_given(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = played(folder, 6, 40)
    assert len(turns) == 6 and max(turns) <= 40
    few = sorted(turns)[2]
    assert len(played(folder, 6, few)) == sum(count <= few for count in turns) < 6

    main([str(folder), "--play", "6", "--turns", str(few)])
    told = capsys.readouterr().out
    assert "valid_unseen: 6 games" in told and "(0 of them in train)" in told
    assert f"of 6 won within {few} turns" in told

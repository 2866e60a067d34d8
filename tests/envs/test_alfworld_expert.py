"""The searching expert by its text alone: what it reads, what it does next, and that it knows nothing else."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("alfworld")

from envs.alfworld.expert import Explorer, Goal, GoalError, blunder, holders, parse_goal

ROOM = "a fridge 1, a cabinet 2, a cabinet 1, a countertop 1, a microwave 1, a sinkbasin 1, and a desk 1"


def opening(task: str, room: str = ROOM) -> str:
    return (
        "-= Welcome to TextWorld, ALFRED! =-\n\nYou are in the middle of a room. Looking quickly around you, you see "
        f"{room}.\n\nYour task is to: {task}."
    )


class House:
    """A scripted room: objects in receptacles, some closed. Answers as the game's grammar does; refuses the rest."""

    def __init__(self, content: dict[str, list[str]], closed: set[str]) -> None:
        self.content = content
        self.closed = set(closed)
        self.at = ""
        self.held = ""
        self.log: list[str] = []

    def play(self, command: str) -> str:
        self.log.append(command)
        verb, *words = command.split()
        names = [f"{a} {b}" for a, b in itertools.pairwise(words) if b.isdigit()]

        match verb:
            case "go" if names[0] in self.content and names[0] != self.at:
                self.at = names[0]
                return f"You arrive at {self.at}. {self._content()}"
            case "open" if names[0] == self.at and self.at in self.closed:
                self.closed.discard(self.at)
                return f"You open the {self.at}. The {self.at} is open. In it, you see {self._things()}."
            case "take" if not self.held and self.at not in self.closed and names[0] in self.content.get(self.at, ()):
                self.held = names[0]

                self.content[self.at].remove(self.held)
                return f"You pick up the {self.held} from the {self.at}."
            case "move" if self.held == names[0] and self.at == names[1] and self.at not in self.closed:
                self.content[self.at].append(self.held)
                self.held = ""
                return f"You move the {names[0]} to the {names[1]}."
            case "heat" | "cool" | "clean" if self.held == names[0] and self.at == names[1]:
                return f"You {verb} the {names[0]} using the {names[1]}."
            case "use" if names[0] in self.content.get(self.at, ()):
                return f"You turn on the {names[0]}."
        return "Nothing happens."

    def _content(self) -> str:
        return f"The {self.at} is closed." if self.at in self.closed else f"On the {self.at}, you see {self._things()}."

    def _things(self) -> str:
        return ", and ".join(f"a {name}" for name in self.content[self.at]) or "nothing"


def house() -> House:
    content = {
        "fridge 1": ["apple 2"],
        "cabinet 2": ["mug 1"],
        "cabinet 1": [],
        "countertop 1": ["apple 1", "knife 1"],
        "microwave 1": [],
        "sinkbasin 1": [],
        "desk 1": ["desklamp 1", "mug 2"],
    }
    return House(content, {"fridge 1", "cabinet 2", "cabinet 1", "microwave 1"})


def solve(task: str, world: House, last: str, limit: int = 40) -> Explorer:
    explorer = Explorer(opening(task))
    while not world.log or world.log[-1] != last:
        assert len(world.log) < limit, world.log
        command = explorer.next_command()
        answer = world.play(command)
        assert answer != "Nothing happens.", f"inadmissible: {command} after {world.log}"
        explorer.observe(command, answer)
    return explorer


@pytest.mark.parametrize(
    ("task", "goal"),
    [
        ("put a mug in cabinet", Goal("place", "mug", "cabinet")),
        ("put some mug on desk", Goal("place", "mug", "desk")),
        ("look at mug under the desklamp", Goal("light", "mug", "")),
        ("examine the mug with the desklamp", Goal("light", "mug", "")),
        ("put a clean apple in fridge", Goal("clean", "apple", "fridge")),
        ("clean some apple and put it in fridge", Goal("clean", "apple", "fridge")),
        ("put a hot apple in fridge", Goal("heat", "apple", "fridge")),
        ("heat some apple and put it in fridge", Goal("heat", "apple", "fridge")),
        ("put a cool apple in desk", Goal("cool", "apple", "desk")),
        ("cool some apple and put it in desk", Goal("cool", "apple", "desk")),
        ("put two mug in cabinet", Goal("two", "mug", "cabinet")),
        ("find two mug and put them in cabinet", Goal("two", "mug", "cabinet")),
    ],
)
def test_every_template_of_the_goal_library_is_read(task: str, goal: Goal) -> None:
    assert parse_goal(opening(task)) == goal


def test_a_task_of_another_form_is_an_error() -> None:
    with pytest.raises(GoalError, match="no task of a known form"):
        parse_goal(opening("be a good robot and tidy up"))


@pytest.mark.parametrize(
    ("task", "last"),
    [
        ("put some mug on countertop", "move mug 1 to countertop 1"),
        ("put two mug in sinkbasin", "move mug 2 to sinkbasin 1"),
        ("put a clean apple in desk", "move apple 2 to desk 1"),
        ("heat some apple and put it in cabinet", "move apple 2 to cabinet 2"),
        ("cool some apple and put it in countertop", "move apple 2 to countertop 1"),
        ("look at mug under the desklamp", "use desklamp 1"),
    ],
)
def test_each_kind_is_solved_without_an_inadmissible_command(task: str, last: str) -> None:
    solve(task, house(), last)


def test_it_searches_where_the_object_can_be_in_the_printed_order() -> None:
    world = house()
    solve("put some mug on countertop", world, "take mug 1 from cabinet 2")
    visited = [command.removeprefix("go to ") for command in world.log if command.startswith("go to ")]
    listed = Explorer(opening("put some mug on countertop")).receptacles
    likely = [name for name in listed if name.split()[0] in holders("mug")]
    assert visited == likely[: len(visited)] and visited[-1] == "cabinet 2"


def test_it_does_not_know_what_it_has_not_read() -> None:
    """The same text leads to the same command, wherever things really are."""
    first = house()
    second = house()
    second.content["cabinet 2"] = []
    second.content["desk 1"] = ["desklamp 1", "mug 1"]
    solve("put some mug on countertop", first, "open cabinet 2")
    solve("put some mug on countertop", second, "open cabinet 2")
    assert first.log == second.log


def test_it_goes_on_after_any_blunder() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        world = house()
        explorer = Explorer(opening("put a clean apple in desk"))

        for _ in range(60):
            wrong = bool(world.log) and rng.random() < 0.3
            command = blunder(explorer, rng) if wrong else explorer.next_command()
            answer = world.play(command)
            assert wrong or answer != "Nothing happens.", world.log
            explorer.observe(command, answer)
            if any(name.startswith("apple") for name in world.content["desk 1"]) and not wrong:
                break
        assert any(name.startswith("apple") for name in world.content["desk 1"]), world.log

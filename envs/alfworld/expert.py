"""A demonstrator that plays as the agent must: it reads the printed text and nothing else.

It does not know where anything is. It looks for the object in the receptacles that can hold it, in the order in which
the room lists them. It opens what is closed, remembers what it saw on the way, and then does what the task asks. It
needs no planner and no state of the engine; that it finds a solution in every solvable game is tested on the real
engine.

    explorer = Explorer(text_of_the_first_observation)
    while not done:
        text, done = play(command := explorer.next_command())
        explorer.observe(command, text)
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from functools import cache

from alfworld.gen import constants

LAMP = "desklamp"  # the only lamp of ALFWorld that can be used
LAMP_STANDS = frozenset({"desk", "sidetable", "dresser", "shelf", "coffeetable", "diningtable", "bed"})
APPLIANCES = {"clean": "sinkbasin", "heat": "microwave", "cool": "fridge"}

_ENTITY = re.compile(r"[a-z]+ \d+")
_GOAL = re.compile(r"Your task is to: (.+?)\.(?:\s|$)")
_SEEN = re.compile(r"you see ([^.]*)\.")
# The goal library's templates, most specific first; the human annotations of ALFRED are not parsed.
_GOALS = (
    ("light", re.compile(r"(?:look at|examine)(?: the)? (?P<object>\w+) (?:under|with) the \w+")),
    ("two", re.compile(r"(?:put|find) two (?P<object>\w+) (?:and put them )?in (?P<receptacle>\w+)")),
    ("clean", re.compile(r"(?:put a clean|clean some) (?P<object>\w+) (?:and put it )?in (?P<receptacle>\w+)")),
    ("heat", re.compile(r"(?:put a hot|heat some) (?P<object>\w+) (?:and put it )?in (?P<receptacle>\w+)")),
    ("cool", re.compile(r"(?:put a cool|cool some) (?P<object>\w+) (?:and put it )?in (?P<receptacle>\w+)")),
    ("place", re.compile(r"put (?:a|some) (?P<object>\w+) (?:in|on) (?P<receptacle>\w+)")),
)


class GoalError(ValueError):
    """A task description that is none of the goal library's templates."""


@dataclass(frozen=True)
class Goal:
    """What a task asks for. `kind`: place, two, clean, heat, cool or light; types are names without a number."""

    kind: str
    object: str
    receptacle: str  # empty for `light`


def parse_goal(text: str) -> Goal:
    """The goal of a first observation. Raises GoalError."""
    found = _GOAL.search(text)
    for kind, pattern in _GOALS if found else ():
        if match := pattern.fullmatch(found[1].strip()):  # type: ignore[index]
            return Goal(kind, match["object"], match.groupdict().get("receptacle") or "")
    raise GoalError(f"no task of a known form in {text[-120:]!r}")


@cache
def holders(object_type: str) -> frozenset[str]:
    """Types of receptacles in which an object of this type may be, by ALFRED's own table."""
    if object_type == LAMP:
        return LAMP_STANDS
    table = constants.VAL_RECEPTACLE_OBJECTS
    return frozenset(
        receptacle.lower() for receptacle, held in table.items() if object_type in {name.lower() for name in held}
    )


def type_of(name: str) -> str:
    return name.partition(" ")[0]


@dataclass
class Explorer:
    """What it has read so far, and what it would do next."""

    opening: str
    goal: Goal = field(init=False)
    receptacles: list[str] = field(init=False)  # as printed
    at: str = ""
    holding: str = ""
    treated: set[str] = field(default_factory=set)  # objects that are clean, hot or cool by now
    placed: set[str] = field(default_factory=set)
    visited: set[str] = field(default_factory=set)  # receptacles whose content was read
    closed: set[str] = field(default_factory=set)
    where: dict[str, str] = field(default_factory=dict)  # object -> receptacle, as last seen

    def __post_init__(self) -> None:
        self.goal = parse_goal(self.opening)
        seen = _SEEN.search(self.opening)
        self.receptacles = _ENTITY.findall(seen[1]) if seen else []

    def observe(self, command: str, text: str) -> None:
        """Take in what the game answered to any command, its own or not."""
        verb, _, rest = command.partition(" ")
        names = _ENTITY.findall(rest)

        if text.startswith("You arrive at ") and names:
            self.at = names[0]
            self._read_content(text)
        elif text.startswith("You open the ") and names:
            self.closed.discard(names[0])
            self._read_content(text)
        elif text.startswith("You close the ") and names:
            self.closed.add(names[0])

        elif text.startswith("You pick up the ") and names:
            self.holding = names[0]
            self.where.pop(names[0], None)
            self.placed.discard(names[0])
        elif text.startswith("You move the ") and len(names) == 2:
            self.holding = ""
            self.where[names[0]] = names[1]
            if names[1] == self._destination():
                self.placed.add(names[0])
        elif verb == self.goal.kind and names and text.startswith(f"You {verb} the "):
            self.treated.add(names[0])

    def _read_content(self, text: str) -> None:
        if f"The {self.at} is closed" in text:
            self.closed.add(self.at)
            return
        self.visited.add(self.at)
        seen = _SEEN.search(text)
        for name in _ENTITY.findall(seen[1]) if seen else ():
            self.where[name] = self.at

    def next_command(self) -> str:
        """The next command; never inadmissible as long as what was read still holds."""
        if self.holding:
            return self._use_what_is_held() if type_of(self.holding) == self.goal.object else self._put_down()
        target = self._known_target()
        if target is None:
            return self._search(self.goal.object)
        return self._reach(self.where[target]) or f"take {target} from {self.at}"

    def _known_target(self) -> str | None:
        wanted = [name for name in self.where if type_of(name) == self.goal.object and name not in self.placed]
        if self.goal.kind == "two":
            done = [name for name in wanted if self.where[name] == self._destination()]
            self.placed.update(done)
            wanted = [name for name in wanted if name not in done]
        return wanted[0] if wanted else None

    def _use_what_is_held(self) -> str:
        kind = self.goal.kind
        if kind == "light":
            lamp = next((name for name in self.where if type_of(name) == LAMP), None)
            return self._search(LAMP) if lamp is None else self._reach(self.where[lamp]) or f"use {lamp}"
        if kind in APPLIANCES and self.holding not in self.treated:
            appliance = self._first(APPLIANCES[kind])
            return self._go(appliance) or f"{kind} {self.holding} with {appliance}"
        destination = self._destination()
        return self._reach(destination) or f"move {self.holding} to {destination}"

    def _put_down(self) -> str:
        """Something else was taken by mistake: it goes back where it is allowed."""
        return f"move {self.holding} to {self.at}"

    def _search(self, object_type: str) -> str:
        unread = [name for name in self.receptacles if name not in self.visited]
        likely = [name for name in unread if type_of(name) in holders(object_type)]
        if not unread:
            return "look"
        return self._reach((likely or unread)[0]) or "look"

    def _reach(self, receptacle: str) -> str | None:
        """The command that is missing before things in this receptacle are at hand; None when it is open before us."""
        return self._go(receptacle) or (f"open {receptacle}" if receptacle in self.closed else None)

    def _go(self, receptacle: str) -> str | None:
        return None if self.at == receptacle else f"go to {receptacle}"  # going where one stands is inadmissible

    def _destination(self) -> str:
        return self._first(self.goal.receptacle) if self.goal.receptacle else ""

    def _first(self, receptacle_type: str) -> str:
        for name in self.receptacles:
            if type_of(name) == receptacle_type:
                return name
        raise GoalError(f"the room lists no {receptacle_type}: {self.opening!r}")


def blunder(explorer: Explorer, rng: random.Random) -> str:
    """A plausible wrong command: most are answered by "Nothing happens.", some lead astray.

    What a beginner does: going where it stands, taking what is not there, opening what is open, wandering off.
    """
    elsewhere = [name for name in explorer.receptacles if name != explorer.at]
    if not explorer.at:
        return f"take {explorer.goal.object} 1 from {rng.choice(explorer.receptacles)}"
    wrong = [f"go to {explorer.at}", f"take {explorer.goal.object} 1 from {explorer.at}", f"open {explorer.at}"]
    if explorer.holding:
        wrong += [f"use {LAMP} 1", f"move {explorer.holding} to {rng.choice(elsewhere or [explorer.at])}"]
    if elsewhere:
        wrong.append(f"go to {rng.choice(elsewhere)}")
    return rng.choice(wrong)

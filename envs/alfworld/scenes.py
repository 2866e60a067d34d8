"""Draws ALFWorld problems from the 120 floor plans and the object tables that the `alfworld` package ships.

A floor plan gives the objects a room can have and the real places of its openable receptacles. The tables say what may
stand where and what can be cleaned, heated or cooled. Receptacles that a plan names without a place get a drawn one.
Training and unseen scenes are the package's own lists, which share no scene.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import alfworld
from alfworld.gen import constants, goal_library

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
TREATMENTS = {  # task type: (what the object must be, the receptacle that makes it so)
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge"),
}
LAMP = "DeskLamp"  # the only lamp that the engine lets be used
LAMP_STANDS = {"Desk", "SideTable", "Dresser", "Shelf", "CoffeeTable", "DiningTable"}

_LAYOUTS = Path(alfworld.__file__).parent / "gen" / "layouts"
_CONTENTS = constants.VAL_RECEPTACLE_OBJECTS
_MOVABLE = set(constants.MOVABLE_RECEPTACLES)
_STATIC = set(_CONTENTS) - _MOVABLE
_OPENABLE = set(constants.OPENABLE_CLASS_LIST) - _MOVABLE
_PORTABLE = {name for kind in _STATIC for name in _CONTENTS[kind] if not name.endswith("Sliced")}
_PROPERTIES = ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable")
_ALWAYS_NAMED = ({"SinkBasin", "Microwave", "Fridge"}, {"Knife", "ButterKnife"})  # constants of the domain
# Receptacles that a plan may name without a place, and how many stand in the room.
_SEVERAL_UNPLACED = {"StoveBurner": 4, "HandTowelHolder": 2, "Shelf": 2, "Cabinet": 4, "Drawer": 3}
_ONE_UNPLACED = """
    CoffeeMachine GarbageCan Toaster Cart Ottoman Safe LaundryHamper TowelHolder ToiletPaperHanger Bed Desk DiningTable
    SideTable CoffeeTable Sofa ArmChair Toilet Dresser CounterTop Fridge Microwave SinkBasin BathtubBasin
"""
_UNPLACED = dict.fromkeys(_ONE_UNPLACED.split(), 1) | _SEVERAL_UNPLACED
# A letter that the engine's names cannot hold, as ALFWorld writes it; # marks a type.
_MANGLED = str.maketrans({"-": "_minus_", "#": "-", "|": "_bar_", "+": "_plus_", ".": "_dot_", ",": "_comma_"})


class Infeasible(Exception):
    """This room has no such task; draw again."""


@dataclass(frozen=True)
class Problem:
    """A drawn game. `key` is equal for two games that differ in nothing a player can see."""

    task_type: str
    scene: int
    target: str
    parent: str  # empty for look_at_obj_in_light
    toggle: str  # empty for all others
    pddl: str
    goal_text: str
    key: str


def scenes_of(task_type: str, unseen: bool) -> list[int]:
    numbers = constants.TEST_SCENE_NUMBERS if unseen else constants.TRAIN_SCENE_NUMBERS
    kinds = constants.GOALS_VALID[task_type]
    return [number for number in numbers if any(number in constants.SCENE_TYPE[kind] for kind in sorted(kinds))]


def draw_problem(
    task_type: str, scene: int, rng: random.Random, max_receptacles: int | None, clutter: tuple[int, int]
) -> Problem:
    """One game of this type in this room. `clutter` bounds the objects nobody asks for. Raises Infeasible."""
    room = _Room(scene, rng, max_receptacles)
    needs, appliance = TREATMENTS.get(task_type, ("", ""))
    if appliance and appliance not in room.types:
        raise Infeasible(f"no {appliance} in scene {scene}")
    toggle = LAMP if task_type == "look_at_obj_in_light" else ""
    if toggle and (LAMP not in room.nameable or not room.types & LAMP_STANDS):
        raise Infeasible(f"no {LAMP} in scene {scene}")

    wanted = [name for name in room.portable if not needs or name in constants.VAL_ACTION_OBJECTS[needs]]
    pairs = []
    for name in wanted:
        fitting = sorted(room.types & _holders(name))
        if toggle:
            pairs += [(name, "")] if fitting else []
        else:
            pairs += [(name, kind) for kind in fitting if len(fitting) > 1 and kind != appliance]

    if not pairs:
        raise Infeasible(f"nothing for {task_type} in scene {scene}")
    target, parent = rng.choice(pairs)
    # Targets start neither where they belong nor where they are treated: no game is won, or half done, at its start.
    elsewhere = {parent, appliance}
    for _ in range((2 if task_type == "pick_two_obj_and_place" else 1) + rng.randint(0, 1)):
        room.place(target, _holders(target) - elsewhere)
    for _ in range(rng.randint(*clutter)):
        if (name := rng.choice(room.portable)) != target and room.types & _holders(name):
            room.place(name, _holders(name))

    if toggle:
        room.place(LAMP, LAMP_STANDS)
    goal = goal_library.gdict[task_type]
    names = {"obj": target, "recep": parent, "toggle": toggle, "mrecep": ""}
    text = rng.choice(goal["templates"]).format(**{key: name.lower() for key, name in names.items()})
    pddl = f"{room.pddl(target, toggle)}\n{goal['pddl'].format(**names)}".translate(_MANGLED)
    key = hashlib.sha256(repr((task_type, scene, target, parent, text, room.contents())).encode()).hexdigest()
    return Problem(task_type, scene, target, parent, toggle, pddl, text, key)


def _holders(name: str) -> set[str]:
    return {kind for kind in _STATIC if name in _CONTENTS[kind]}


@cache
def _plan(scene: int) -> tuple[tuple[str, ...], tuple[tuple[str, tuple[float, ...]], ...]]:
    """(object types in the room, places of openable receptacles) of a floor plan."""
    objects = json.loads((_LAYOUTS / f"FloorPlan{scene}-objects.json").read_text())
    places = json.loads((_LAYOUTS / f"FloorPlan{scene}-openable.json").read_text())
    return tuple(objects), tuple((name, tuple(place)) for name, place in sorted(places.items()))


class _Room:
    """Receptacles of a floor plan, each at a location of its own, and the objects placed so far."""

    def __init__(self, scene: int, rng: random.Random, max_receptacles: int | None) -> None:
        self._rng = rng
        self.nameable, places = _plan(scene)
        self._receptacles: dict[str, tuple[str, str]] = {}  # id: (type, location)
        for name, (x, z, angle, horizon) in places:
            kind = name.split("|")[0]
            if kind in ("Sink", "Bathtub"):
                kind = f"{kind}Basin"
                name = f"{name}|{kind}"
            if kind in _STATIC:
                self._add(name, kind, int(x / 0.25), int(z / 0.25), int(angle / 90), int(horizon))

        placed = {kind for kind, _ in self._receptacles.values()}
        for kind in self.nameable:
            for _ in range(_UNPLACED.get(kind, 0) if kind not in placed else 0):
                basin = kind.removesuffix("Basin")
                name = f"{basin}|{self._point()}" + (f"|{kind}" if basin != kind else "")
                turn = rng.randint(0, 3)
                horizon = rng.choice((0, 15, 30, 45, 60))
                self._add(name, kind, rng.randint(-12, 12), rng.randint(-12, 12), turn, horizon)

        if max_receptacles is not None and len(self._receptacles) > max_receptacles:
            kept = rng.sample(sorted(self._receptacles), max_receptacles)
            self._receptacles = {name: self._receptacles[name] for name in sorted(kept)}
        self.types = {kind for kind, _ in self._receptacles.values()}
        self.portable = [name for name in self.nameable if name in _PORTABLE]
        self._objects: dict[str, tuple[str, str]] = {}  # id: (type, receptacle)

    def place(self, kind: str, stands: set[str]) -> None:
        """Place one more object, on or in a receptacle of one of these types. Raises Infeasible."""
        spots = sorted(name for name, (type_, _) in self._receptacles.items() if type_ in stands)
        if not spots:
            raise Infeasible(f"nowhere to put a {kind}")
        name = f"{kind}|{self._point()}"
        while name in self._objects:
            name = f"{kind}|{self._point()}"
        self._objects[name] = (kind, self._rng.choice(spots))

    def contents(self) -> list[tuple[str, int, list[str]]]:
        """Receptacles by type and number with the types of what is in them."""
        numbers: Counter[str] = Counter()
        listed = []
        for name, (kind, _) in sorted(self._receptacles.items()):
            numbers[kind] += 1
            inside = sorted(type_ for type_, where in self._objects.values() if where == name)
            listed.append((kind, numbers[kind], inside))
        return listed

    def pddl(self, target: str, toggle: str) -> str:
        """Objects and initial state; the goal follows."""
        rng = self._rng
        receptacles = sorted(self._receptacles.items())
        objects = sorted(self._objects.items())
        start = f"loc|{rng.randint(92, 108)}|{rng.randint(92, 108)}|{rng.randint(0, 3)}|30"  # away from everything
        object_types = sorted({kind for _, (kind, _) in objects})
        named_receptacles = sorted(self.types | _ALWAYS_NAMED[0])
        named_objects = sorted({*object_types, *_ALWAYS_NAMED[1], target} | ({toggle} if toggle else set()))

        declared = ["agent1 # agent"]
        declared += [f"{kind}Type # otype" for kind in named_objects]
        declared += [f"{kind}Type # rtype" for kind in named_receptacles]
        declared += [f"{name} # object" for name, _ in objects]
        declared += [f"{name} # receptacle" for name, _ in receptacles]
        declared += [f"{place} # location" for place in sorted({place for _, (_, place) in receptacles} | {start})]

        facts = [f"(atLocation agent1 {start})", "(= (total-cost) 0)"]
        for name, (kind, place) in receptacles:
            facts += [f"(receptacleType {name} {kind}Type)", f"(receptacleAtLocation {name} {place})"]
            facts += [f"(openable {name})"] if kind in _OPENABLE else []

        for name, (kind, where) in objects:
            facts += [f"(objectType {name} {kind}Type)", f"(inReceptacle {name} {where})"]
            facts.append(f"(objectAtLocation {name} {self._receptacles[where][1]})")
            facts += [f"(isReceptacleObject {name})"] if kind in _MOVABLE else []
            facts += [f"(pickupable {name})"] if kind != LAMP else []
            facts += [f"({each.lower()} {name})" for each in _PROPERTIES if kind in constants.VAL_ACTION_OBJECTS[each]]
        for kind in sorted(self.types):
            facts += [f"(canContain {kind}Type {each}Type)" for each in object_types if each in _CONTENTS[kind]]
        lines = ["(define (problem plan_trial)", "    (:domain alfred)", "    (:objects"]
        lines += [f"        {each}" for each in declared]
        lines += ["    )", "    (:init", *(f"        {each}" for each in facts), "    )"]
        return "\n".join(lines)

    def _add(self, name: str, kind: str, x: int, z: int, turn: int, horizon: int) -> None:
        """Add it at this place or, if something stands there, one beside it: `go to` names one receptacle per
        location."""
        taken = {place for _, place in self._receptacles.values()}
        while (place := f"loc|{x}|{z}|{turn}|{horizon}") in taken:
            x += self._rng.choice((-1, 1))
            z += self._rng.choice((-1, 0, 1))
        self._receptacles[name] = (kind, place)

    def _point(self) -> str:
        ranges = ((-5.0, 5.0), (0.1, 2.2), (-5.0, 5.0))
        return "|".join(f"{self._rng.uniform(*each):+06.2f}" for each in ranges)

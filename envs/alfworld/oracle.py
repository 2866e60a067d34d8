"""A walkthrough from the problem's own facts: proves that a game can be won. It knows where everything is.

The package's planner takes up to 90 s and its hand-coded expert fails on `pick_two_obj_and_place`; this takes 1 ms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from textworld.generator.game import EntityInfo
from textworld.logic import Proposition

from envs.alfworld.scenes import LAMP, TREATMENTS


class Oracle:
    """The room as its facts describe it."""

    def __init__(self, facts: Iterable[Proposition], entities: Mapping[str, EntityInfo]) -> None:
        self._names = {key: info.name.strip() for key, info in entities.items()}
        self._inside: dict[str, str] = {}
        self._receptacles: dict[str, list[str]] = {}  # by lower-case type
        self._objects: dict[str, list[str]] = {}
        self._closed: set[str] = set()

        for fact in sorted(facts):
            arguments = [variable.name for variable in fact.arguments]
            match fact.name:
                case "inreceptacle":
                    self._inside[arguments[0]] = arguments[1]
                case "receptacletype":
                    self._receptacles.setdefault(arguments[1].removesuffix("type"), []).append(arguments[0])
                case "objecttype":
                    self._objects.setdefault(arguments[1].removesuffix("type"), []).append(arguments[0])
                case "openable":
                    self._closed.add(arguments[0])

    def walkthrough(self, task_type: str, target: str, parent: str) -> list[str]:
        """Commands that win. Raises LookupError if the room lacks what the task needs."""
        self._plan: list[str] = []
        self._at = ""
        found = [name for name in self._objects[target.lower()] if name in self._inside]
        if task_type == "look_at_obj_in_light":
            self._take(found[0])
            lamp = self._objects[LAMP.lower()][0]
            self._reach(self._inside[lamp])
            self._plan.append(f"use {self._names[lamp]}")
            return self._plan

        goal = self._receptacles[parent.lower()][0]
        for name in found[: 2 if task_type == "pick_two_obj_and_place" else 1]:
            self._take(name)
            if task_type in TREATMENTS:
                appliance = self._receptacles[TREATMENTS[task_type][1].lower()][0]
                self._go(appliance)  # heating, cooling and cleaning need no opening
                self._plan.append(f"{task_type.split('_')[1]} {self._names[name]} with {self._names[appliance]}")
            self._reach(goal)
            self._plan.append(f"move {self._names[name]} to {self._names[goal]}")
        return self._plan

    def _take(self, name: str) -> None:
        where = self._inside[name]
        self._reach(where)
        self._plan.append(f"take {self._names[name]} from {self._names[where]}")

    def _go(self, receptacle: str) -> None:
        if self._at != receptacle:  # where one stands already, `go to` is not admissible
            self._plan.append(f"go to {self._names[receptacle]}")
            self._at = receptacle

    def _reach(self, receptacle: str) -> None:
        self._go(receptacle)
        if receptacle in self._closed:
            self._closed.discard(receptacle)
            self._plan.append(f"open {self._names[receptacle]}")

"""What a head writes down, so that another process can take its place: `<run>/head.jsonl`.

    {"type": "listens", "agents": 40123, "control": 40124, "boot": "…"}   where it is reached, and since which boot
    {"type": "machine", "agent": "agent.5f…", "there": true}              who has joined, and who is gone
    {"type": "began", "name": "generator.0.2"}                            before it begins
    {"type": "ranks", "place": "agent.5f…"}                               where they stand; empty: in the head's folder

A line is written before what it says is done. So no incarnation has a number twice, whichever head begins it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import Struct

from rl.config.damage import readable
from rl.observe.trace import boot_id

FILE = "head.jsonl"


class Listens(Struct, frozen=True, tag="listens"):
    agents: int  # the port
    control: int
    boot: str


class Machine(Struct, frozen=True, tag="machine"):
    agent: str
    there: bool


class Began(Struct, frozen=True, tag="began"):
    name: str


class Ranks(Struct, frozen=True, tag="ranks"):
    place: str


Line = Listens | Machine | Began | Ranks


@dataclass
class Before:
    """What the heads before have written."""

    listens: Listens | None = None
    agents: set[str] = field(default_factory=set)
    """Those that belonged to the run."""
    newest: dict[str, int] = field(default_factory=dict)
    """The newest incarnation of each process: {"generator.0": 2}."""
    ranks: str | None = None
    """Where the learner's ranks stood last."""

    @property
    def may_go_on(self) -> bool:
        """Whether processes may have outlived it, by clocks that this head has as well."""
        return self.listens is not None and self.listens.boot == boot_id()


def read_before(folder: Path) -> Before:
    """What stands in the file of a run's folder; nothing where there is none."""
    before = Before()
    path = folder / FILE
    lines = path.read_bytes().splitlines() if path.exists() else []
    kinds: type[Line] = Line  # type: ignore[assignment]

    for line in readable(lines, kinds):
        match line:
            case Listens():
                before.listens = line
            case Machine(agent, there):
                (before.agents.add if there else before.agents.discard)(agent)

            case Began(name):
                process, _, incarnation = name.rpartition(".")
                before.newest[process] = int(incarnation)
            case Ranks(place):
                before.ranks = place
    return before


class HeadFile:
    """Appends to the file; a line is in the kernel's hands on return."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._file = self._path.open("ab", buffering=0)

    def write(self, line: Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")

    def remove(self) -> None:
        """The run has ended; nobody takes this head's place."""
        self._file.close()
        self._path.unlink(missing_ok=True)

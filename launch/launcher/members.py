"""Which machines belong to a run, and what stands on them: state machines without sockets and without a clock.

An agent holds a lease. It counts from when it *sent* the beat that the head has answered, and the head counts from when
it received the beat, which is later. So when the head takes a machine for lost, its lease has been over for the margin,
and nothing runs there any more. Times are seconds of a clock that goes on while a machine sleeps.

Machines have numbers from 1. Who joins takes the one that it wants, or the lowest that is free; beyond `nodes` it is a
spare.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

AT_HEAD = ("broker", "proxy")
"""Roles that stand on no machine of an agent."""
KEEPS = "learner"
"""The role whose files are the run's own: checkpoints, versions, the model."""
MOVES = ("generator", "env_server")
"""Roles that go back to their machine when somebody has taken its place: that costs their running episodes only."""


class Lease:
    """The agent's side."""

    def __init__(self, seconds: float, sent: float) -> None:
        """sent: when it said the hello that was answered."""
        self.seconds = seconds
        self._sent: dict[int, float] = {}
        self._beats = 0
        self.until = sent + seconds

    def beat(self, now: float) -> int:
        """The number of a beat that is sent now."""
        self._beats += 1
        self._sent[self._beats] = now
        return self._beats

    def answered(self, beat: int) -> None:
        """The head has received it. What comes twice, late, or answers nothing changes nothing."""
        sent = self._sent.get(beat)
        if sent is not None:
            self.until = max(self.until, sent + self.seconds)
            self._sent = {number: when for number, when in self._sent.items() if number > beat}


@dataclass
class Member:
    """One machine. `free`: the names of its GPUs that nobody has."""

    agent: bytes
    number: int
    free: list[str]
    until: float
    """When it is lost, unless it is heard before."""
    sees: bool | None = None
    """Whether the head's folder of the run is seen there; None: it has not said so yet."""
    leaving: bool = False
    holds: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The processes on it that have not ended, with their GPUs."""


class Members:
    """The head's side. A process is known by its name, `generator.0.2`."""

    def __init__(self, nodes: int, fence_s: float, place: Mapping[Any, Sequence[int]]) -> None:
        self._nodes = nodes
        self._patience_s = fence_s
        self._place = place
        self._homes: dict[str, int] = {}  # where `generator.0` began, which is where it belongs
        self._holder = b""
        self.by_agent: dict[bytes, Member] = {}

    def join(self, now: float, agent: bytes, gpus: Iterable[str], wanted: int = 0) -> Member:
        """A machine is there; saying so again changes nothing. wanted: the number that it has if that is free."""
        if agent not in self.by_agent:
            taken = {each.number for each in self.by_agent.values()}
            lowest = next(number for number in range(1, len(taken) + 2) if number not in taken)
            number = wanted if wanted > 0 and wanted not in taken else lowest
            self.by_agent[agent] = Member(agent, number, list(gpus), now + self._patience_s)
        return self.by_agent[agent]

    def keep(self, member: Member, name: str, gpus: Iterable[str]) -> None:
        """A process stands there already."""
        member.holds[name] = tuple(gpus)
        member.free = [gpu for gpu in member.free if gpu not in member.holds[name]]
        self._homes.setdefault(_process(name), member.number)

    def heard(self, now: float, agent: bytes) -> Member | None:
        """A beat was received. None: it was taken for lost, and must end."""
        member = self.by_agent.get(agent)
        if member is not None:
            member.until = now + self._patience_s
        return member

    def lost(self, now: float) -> list[Member]:
        """Machines whose lease is over for certain. They are forgotten."""
        return [self.by_agent.pop(member.agent) for member in [*self.by_agent.values()] if member.until < now]

    def complete(self) -> bool:
        """Whether as many are there as the run was planned for."""
        return sum(each.sees is not None for each in self.by_agent.values()) >= self._nodes

    def assign(self, name: str, gpus: int) -> Member | None:
        """The machine on which this process is to stand: one of those of its role; if these are gone, any other. None:
        nobody has room for it.

        With GPUs the first that has enough free, so that ranks stand together; else the one with the fewest processes.
        For rank 0, which writes what a run keeps, first of all one that sees the head's folder; for others such a one
        where that is all the same.
        """
        staying = [each for each in self.by_agent.values() if not each.leaving and len(each.free) >= gpus]
        planned = [each for each in staying if each.number <= self._nodes] or staying
        named = self._place.get(name.partition(".")[0])
        allowed = [each for each in planned if named is None or each.number in named] or planned
        home = self._homes.get(_process(name))
        if not allowed:
            return None

        def cost(each: Member) -> tuple[object, ...]:
            copied = name.startswith(KEEPS) and not each.sees
            writes = name.startswith(f"{KEEPS}.0.")
            return each.number != home, writes and copied, 0 if gpus else len(each.holds), copied, each.number

        chosen = min(allowed, key=cost)
        self._homes.setdefault(_process(name), chosen.number)
        chosen.holds[name] = tuple(chosen.free[:gpus])
        del chosen.free[:gpus]
        return chosen

    def holder(self) -> Member | None:
        """Who holds a copy of what stands in the head's folder: a machine that does not see it, the same one as long as
        that is there."""
        apart = [each for each in self.by_agent.values() if each.sees is False and not each.leaving]
        chosen = min(apart, key=lambda each: (each.agent != self._holder, each.number), default=None)
        self._holder = chosen.agent if chosen is not None else b""
        return chosen

    def ended(self, name: str) -> None:
        """A process has ended; its GPUs are free."""
        for member in self.by_agent.values():
            member.free += member.holds.pop(name, ())

    def away(self, number: int) -> list[str]:
        """Processes that belong on this machine, stand on another, and may move."""
        elsewhere = [name for each in self.by_agent.values() if each.number != number for name in each.holds]
        return [name for name in elsewhere if name.startswith(MOVES) and self._homes.get(_process(name)) == number]


def _process(name: str) -> str:
    """`generator.0` of `generator.0.2`."""
    return name.rpartition(".")[0]

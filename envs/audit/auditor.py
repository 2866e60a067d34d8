"""Who audits: what a family offers for it, the books of what came out, and the one who does it beside a run.

A verifier that accepts a wrong answer is found by nothing else: its rewards look like success. What is asked anew is
certain by construction, so that one false accept is proof.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

from envs.audit.changes import Variant
from rl.observe.alarms import Alarms
from rl.observe.intervals import wilson
from rollout.episodes.environment import EnvironmentFamily

ANSWERS = 24  # of one version of the weights, over all servers
SHARE = 0.02  # of the CPU seconds of the server and of what it has started and reaped
RECENT = 72  # answers over which false refusals are counted
_SHOWN = 200  # characters of an answer in a message


@dataclass(frozen=True)
class Change:
    """A question for the verifier: `response` to `task`, which was changed in its place where that is surer."""

    what: str
    equal: bool
    task: Any
    response: str


@runtime_checkable
class Audited(Protocol):
    """A family whose verifier can be audited."""

    audit_s: float
    """What the audit of one answer takes, as long as none was measured."""

    async def changes(self, task: Any, response: str, dice: random.Random) -> list[Change]:
        """What is certainly wrong, and certainly equal, in the place of a rewarded response."""
        ...

    async def judged(self, change: Change) -> bool:
        """Whether the verifier accepts it."""
        ...


async def replayed(family: EnvironmentFamily, change: Change) -> bool:
    """The verdict of an environment of one turn."""
    environment = family.make()
    try:
        await environment.reset(change.task)
        return (await environment.step(change.response)).success
    finally:
        await environment.close()


def variants(task: Any, before: str, made: list[Variant], after: str = "") -> list[Change]:
    """Variants of an answer, with what stands around it."""
    return [Change(what, equal, task, f"{before}{text}{after}") for what, equal, text in made]


@dataclass
class Tally:
    """What came out."""

    answers: int = 0
    wrong: int = 0
    accepted: int = 0
    """Wrong ones that were accepted."""
    equal: int = 0
    refused: int = 0
    """Equal ones that were refused."""
    seconds: float = 0.0
    examples: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in ("answers", "wrong", "accepted", "equal", "refused", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.examples = [*self.examples, *other.examples][:8]

    def said(self) -> str:
        """For people: both shares with their 95 % intervals."""
        if not self.answers:
            return "no answer could be changed with certainty"
        accepted, refused = interval(self.accepted, self.wrong), interval(self.refused, self.equal)
        return (
            f"{self.answers} answers: {self.accepted} of {self.wrong} wrong ones accepted ({accepted}), "
            f"{self.refused} of {self.equal} equal ones refused ({refused})"
        )


def interval(count: int, of: int) -> str:
    low, high = wilson(count, of)
    return f"{low:.1%} to {high:.1%}"


async def audit(family: Any, task: Any, response: str, dice: random.Random) -> Tally:
    """Ask anew about one rewarded response."""
    begin = time.monotonic()
    tally = Tally()
    for change in await family.changes(task, response, dice):
        accepted = await family.judged(change)
        tally.wrong += not change.equal
        tally.equal += change.equal
        if accepted == change.equal:
            continue
        tally.accepted += accepted
        tally.refused += not accepted
        said = "accepted" if accepted else "refused"
        tally.examples.append(f"{change.what}: {change.response[-_SHOWN:]!r} was {said}")

    tally.answers = int(tally.wrong + tally.equal > 0)
    tally.seconds = time.monotonic() - begin
    return tally


def cpu_s() -> float:
    """CPU seconds of this process, and of children that have ended."""
    return sum(os.times()[:4])


class Auditor:
    """Audits answers of a run, one at a time, as long as they cost less than their share.

    An audit is charged by the clock, which is at least its CPU time wherever it was spent.
    """

    def __init__(self, family: Any, answers: int, alarms: Alarms, cpu: Callable[[], float] = cpu_s) -> None:
        self.tally = Tally()
        self._family = family if isinstance(family, Audited) else None
        self._answers = answers
        self._alarms = alarms
        self._cpu = cpu

        self._version = -1
        self._left = 0
        self._waiting: deque[tuple[Any, str]] = deque(maxlen=max(1, answers))
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._told: list[dict[str, float]] = []

        self._dice = random.Random(0)
        self._task: asyncio.Task[None] | None = None
        self.error: Exception | None = None

    def offer(self, version: int, task: Any, response: str) -> None:
        """A rewarded response, given under this version of the weights; most are not audited."""
        if self._family is None or self.error is not None:
            return
        if version > self._version:
            self._version = version
            self._left = self._answers
        if self._left > 0:
            self._left -= 1
            self._waiting.append((task, response))
        if self._waiting and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._work(), name="audit")

    def news(self) -> dict[str, float]:
        """What the last audits found, as metrics for the next trajectory; each is told once."""
        told, self._told = self._told, []
        names = {name for each in told for name in each}
        shares = {name: [each[name] for each in told if name in each] for name in names}
        return {name: sum(values) / len(values) for name, values in shares.items()}

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def affordable(self) -> bool:
        assert self._family is not None
        done = self.tally.answers
        expected = self.tally.seconds / done if done else self._family.audit_s
        return self.tally.seconds + expected <= SHARE * self._cpu()

    async def _work(self) -> None:
        while self._waiting and self.affordable():
            task, response = self._waiting.popleft()
            try:
                found = await audit(self._family, task, response, self._dice)
            except Exception as error:  # of the host; it must not end the run, and it would come again
                self.error = error
                print(f"the audit of the verifier ends: {type(error).__name__}: {error}", flush=True)
                return
            self._note(found)
            await asyncio.sleep(0)  # episodes go first

    def _note(self, found: Tally) -> None:
        self.tally.add(replace(found, answers=max(1, found.answers)))
        self._recent.append(found.refused)
        if found.wrong:
            self._told.append({"audit/false_accept": found.accepted / found.wrong})
        if found.equal:
            self._told.append({"audit/false_refuse": found.refused / found.equal})

        example = found.examples[0] if found.examples else ""
        refused = sum(each > 0 for each in self._recent)
        many = refused >= self._alarms.limit("verifier-wrong", "refused")
        wrong = found.accepted > 0 or (found.refused > 0 and many)
        self._alarms.check("verifier-wrong", wrong, f"of a rewarded answer, {example}")

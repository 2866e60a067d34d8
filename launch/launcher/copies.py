"""Which checkpoint counts, where the learner's machine does not see the head's folder of the run: no sockets here.

The learner writes into the folder of its own machine. The head copies what appears there: a checkpoint counts once the
head holds it whole, with the broker's journal of that position, so that two machines have it. The trained model comes
as well. When the ranks begin on another machine, they begin from the checkpoint that counts; whatever else stands there
is of a time that was taken back. So is what the machine before still offers.

A folder is known by its path below that of the run, as `checkpoints/step-40`, and by the digest of its digests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

CHECKPOINTS = "checkpoints/"
_OTHERS = ("model", "adapter")
_STEP = "step-"
TIMELINES = 1000
"""Timelines of one incarnation of the ranks, more than it begins: those of the next ones stay apart."""


def step_of(name: str) -> int:
    """The step of a checkpoint; -1 where the folder is none."""
    number = name.removeprefix(CHECKPOINTS + _STEP)
    return int(number) if name.startswith(CHECKPOINTS + _STEP) and number.isdecimal() else -1


def is_known(name: str) -> bool:
    """Whether the head takes such a folder at all."""
    return name in _OTHERS or (step_of(name) >= 0 and name == f"{CHECKPOINTS}{_STEP}{step_of(name)}")


@dataclass
class Copies:
    """The head's side. `held`: the digests of the folders that stand whole at the head."""

    held: dict[str, str] = field(default_factory=dict)
    place: bytes | None = None
    """Where rank 0 stands: an agent with a folder of its own; empty, where the head's is seen; None before it began."""
    offers: dict[str, str] = field(default_factory=dict)
    """The folders that rank 0's machine has."""

    @property
    def counts(self) -> str | None:
        """The newest checkpoint that counts."""
        newest = max(self.held, key=step_of, default="model")
        return newest if step_of(newest) >= 0 else None

    def begin(self, place: bytes, held: Mapping[str, str], *, always: bool = False) -> bool:
        """Rank 0 begins there. held: what the head has by now. Whether the ranks are to begin from what counts: they
        stood elsewhere before, or do so `always`."""
        anew = self.place is not None and (always or place != self.place)
        self.held = dict(held)
        if anew or self.place is None:
            self.offers = {}
        self.place = place
        return anew

    def offered(self, agent: bytes, offers: Mapping[str, str]) -> None:
        """An agent says what its machine has. That of any other than rank 0's is of no interest."""
        if agent == self.place:
            self.offers = {name: digest for name, digest in offers.items() if is_known(name)}

    def wanted(self) -> tuple[str, str] | None:
        """What is to be copied next: the newest checkpoint first."""
        counts = step_of(self.counts or "")
        new = [name for name, digest in self.offers.items() if self.held.get(name) != digest]
        new = [name for name in new if step_of(name) < 0 or step_of(name) >= counts]
        name = max(new, key=step_of, default=None)
        return (name, self.offers[name]) if name is not None else None

    def arrived(self, name: str, digest: str) -> list[str]:
        """It stands whole at the head. Returns checkpoints that it makes superfluous: older ones that the learner's
        machine has dropped."""
        self.held[name] = digest
        superfluous = [each for each in self.held if 0 <= step_of(each) < step_of(name) and each not in self.offers]
        for each in superfluous:
            del self.held[each]
        return superfluous

    def take_back(self, step: int) -> list[str]:
        """This step is to be the newest again. Returns the checkpoints behind it, which are held no more."""
        behind = [name for name in self.held if step_of(name) > step]
        for name in behind:
            del self.held[name]
        return behind


class Parts:
    """Which parts of some files are to be asked for: a few at a time, in order, and again where no answer came."""

    def __init__(self, sizes: Mapping[str, int], chunk_bytes: int, window: int, again_s: float) -> None:
        whole = {file: range(0, max(1, size), chunk_bytes) for file, size in sizes.items()}
        self._left = deque((file, offset) for file, offsets in whole.items() for offset in offsets)
        self._coming: deque[tuple[str, int]] = deque()
        self._window = window
        self._again_s = again_s
        self._again_at = float("inf")

    @property
    def done(self) -> bool:
        return not self._left and not self._coming

    def asks(self, now: float) -> list[tuple[str, int]]:
        """File and offset of each part that is to be asked for now."""
        if self._coming and now >= self._again_at:
            self._left.extendleft(reversed(self._coming))
            self._coming.clear()
        asked = []
        while self._left and len(self._coming) < self._window:
            asked.append(self._left.popleft())
            self._coming.append(asked[-1])
        if asked:
            self._again_at = now + self._again_s
        return asked

    def take(self, file: str, offset: int, now: float) -> bool:
        """A part has come. False if it is not the one that comes next: it was asked for twice, or never."""
        if not self._coming or self._coming[0] != (file, offset):
            return False
        self._coming.popleft()
        self._again_at = now + self._again_s
        return True

"""The seam `weights`: how tensors come from the ranks of the learner to the ranks of every engine.

    rank r of the learner                               tensor-parallel rank of an engine
    sender.offer(n, pieces)                             receiver.take(at_least) -> version, (name, tensor) ...
    sender.receipt(n)       rank 0                      receiver.receipt()      before anything is loaded
    sender.announce(version)                            receiver.release()      after the load

A channel is a pair of classes in one file, and a `Channel` that names them: `weights.transport=module:NAME`.
The updater (`rl.weights.updater`) says which engine takes when, and judges what arrived, whatever the channel.
`docs/adding-a-channel.md` has a complete one.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from rl.config.failures import EndsRun
from rl.wire.messages import Version
from rl.wire.run import RunFile

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
ITEM_BYTES = {"float32": 4, "bfloat16": 2}

Entry = tuple[str, tuple[int, ...], str]
"""Name, whole shape and engine's dtype (float32 or bfloat16) of a tensor; in one order in all ranks."""


class WeightsError(EndsRun, RuntimeError):
    """Weights did not reach an engine as published: one line that says which, and what to do."""


class WeightsCorrupt(WeightsError):
    """What was received differs from what the senders published."""


class Placement(NamedTuple):
    """Where a piece stands in its tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    row: int = 0  # of the first axis, at which the piece begins


Piece = tuple[str, "Tensor | np.ndarray", Placement]
"""What one rank holds of a tensor, in any dtype and on any device. It may be empty."""


class Wait(Protocol):
    def __call__(self, what: str, ask: Callable[[float], T]) -> T:
        """`ask(seconds)` again and again until it answers, and does not raise WaitExpired.

        Meanwhile the supervisor is listened to, whose word may end the process. Raises WaitExpired that names `what`
        after `weights.deadline_s`.
        """
        ...


class Sender(ABC):
    """The learner's end of the channel, one on each rank of the learner. All ranks offer the same versions in the same
    order, in one thread."""

    def __init__(self, run: RunFile, rank: int, entries: Iterable[Entry], wait: Wait | None = None) -> None:
        self.run = run
        self.rank = rank
        self.entries = list(entries)
        self.wait: Wait = wait or self._wait_alone

    def open(self) -> None:  # noqa: B027
        """Make what receivers and other ranks look for; once, before anything is offered."""

    @abstractmethod
    def offer(self, n: int, pieces: Iterable[Piece]) -> None:
        """This rank's part of version `n`. The tensors change as soon as this has returned.

        It never waits for an engine that loads. Of a version that is not announced yet no engine is told.
        """

    def receipt(self, n: int) -> int | None:
        """To be called on rank 0: the checksum of version `n`, once all ranks have offered it.

        None where no host sees the bytes. The probe alone then shows that they arrive, and a learner that comes back
        begins a new timeline.
        """
        return None

    @abstractmethod
    def announce(self, version: Version) -> None:
        """To be called on rank 0: engines may take what was offered as `version.n`, and know it by this name."""

    def stats(self) -> dict[str, float]:
        """Numbers of the channel for the metrics, cumulative; on rank 0."""
        return {}

    def receiver_died(self, name: str, incarnation: int) -> None:  # noqa: B027
        """The receivers `name-...` of this or an earlier incarnation are dead: of all ranks of one engine.

        Called inside `wait` as well.
        """

    def close(self) -> None:  # noqa: B027
        """Free what `open` made; does nothing if it is not open."""

    def _wait_alone(self, what: str, ask: Callable[[float], T]) -> T:
        return ask(self.run.config.weights.deadline_s)


class Receiver(ABC):
    """The engine's end of the channel, one on each tensor-parallel rank of an engine. Its methods are called from
    several threads, one at a time.

    `take` and `receipt` may take as long as the bytes need: generation goes on meanwhile, and pauses from the first
    tensor read to `release`.
    """

    progress: int = 0
    """It grows while `take` and `receipt` advance, in bytes. Any thread may read it."""

    def __init__(self, run: RunFile, name: str, incarnation: int, device: str = "cpu") -> None:
        """`name`: `generator-0-1` is rank 1 of generator 0. `device`: where the engine's own tensors are."""
        self.run = run
        self.name = name
        self.incarnation = incarnation
        self.device = device

    @abstractmethod
    def take(self, at_least: Version, deadline_s: float) -> tuple[Version, Iterable[tuple[str, Tensor]]]:
        """The newest announced version, not older than `at_least`, and all its tensors, whole.

        The tensors are read once at most, and stay as they are until `release`. The first call finds the senders.
        Raises WaitExpired, naming who is missing, after `deadline_s` without progress.
        """

    def receipt(self) -> int | None:
        """The checksum of what was taken, as the sender's. Raises WeightsCorrupt where it cannot be right."""
        return None

    def release(self) -> bool:
        """The tensors have been read, or are not wanted. False: they changed meanwhile; take and read them again."""
        return True

    def close(self) -> None:  # noqa: B027
        """Nothing is taken any more."""


class Channel(NamedTuple):
    """What `weights.transport` names."""

    sender: type[Sender]
    receiver: type[Receiver]


def label(version: Version) -> str:
    """A version in messages: `timeline.n`."""
    return f"{version.timeline}.{version.n}"


def bytes_of(entries: Iterable[Entry]) -> int:
    """The bytes of one version in the engine's dtype."""
    return sum(math.prod(shape) * ITEM_BYTES[dtype] for _, shape, dtype in entries)

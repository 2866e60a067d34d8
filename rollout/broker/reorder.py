"""The order of one server's messages, which travel on two sockets but share one sequence number.

Without it a hello or a failure could overtake a result. Sequence numbers are per incarnation, from 0.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Reorder(Generic[T]):
    """`push` returns what is due, in order; a number seen before returns nothing and counts as a duplicate.

    At most `limit` messages wait for a missing one: a server has no more open, so more is a fault of the peer.
    """

    def __init__(self, limit: int = 100_000) -> None:
        self.limit = limit
        self.next = 0
        self.duplicates = 0
        self._early: dict[int, T] = {}

    def push(self, seq: int, message: T) -> list[T]:
        """Raises ValueError for a number that no server would send."""
        if seq < self.next or seq in self._early:
            self.duplicates += 1
            return []
        if seq > self.next:
            if seq - self.next > self.limit:
                raise ValueError(f"message {seq} while {self.next} is awaited")
            self._early[seq] = message
            return []

        due = [message]
        self.next += 1
        while self._early and (follower := self._early.pop(self.next, None)) is not None:
            due.append(follower)
            self.next += 1
        return due

    @property
    def waiting(self) -> int:
        return len(self._early)

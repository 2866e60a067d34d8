"""The gate (F2): a generator holds a request until it has loaded the version that the request asks for."""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

from rl.wire.messages import Version

K = TypeVar("K")


class Gate(Generic[K]):
    """Keys in the order of (version asked for, arrival). What was answered meanwhile is the caller's to skip."""

    def __init__(self) -> None:
        self._held: list[tuple[Version, int, K]] = []
        self._arrivals = 0

    def admit(self, asked: Version, key: K, loaded: Version) -> bool:
        """Whether the request may run now; else it is held."""
        if asked <= loaded:
            return True
        heapq.heappush(self._held, (asked, self._arrivals, key))
        self._arrivals += 1
        return False

    def release(self, loaded: Version) -> list[K]:
        """What `loaded` lets through, in order."""
        due: list[K] = []
        while self._held and self._held[0][0] <= loaded:
            due.append(heapq.heappop(self._held)[2])
        return due

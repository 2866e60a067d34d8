"""Data structures of the routing decision: which generator is the least loaded with room, who waits.

Both keep the work of one event logarithmic, because the same objects route for one generator on a
laptop and for a thousand in virtual time.
"""

from __future__ import annotations

import heapq
from typing import Generic, Protocol, TypeVar

INFINITE_LOAD = 1 << 62


class LoadTree:
    """Generators by (load, free KV tokens): a binary tree whose nodes hold the least load and the most room below.

    `set` costs O(log G) and stops at the first unchanged ancestor. `best` descends towards the least load, pruning what
    has no room. After a fixed number of visits it settles for the best seen so far, or for the generator with the most
    room (rare: load and room go together).
    """

    def __init__(self) -> None:
        self._size = 1
        self._load = [INFINITE_LOAD] * 2
        self._room = [-1] * 2

    def set(self, leaf: int, load: int, room: int) -> None:
        """`room` < 0 takes the generator out of the choice."""
        while leaf >= self._size:
            self._grow()
        loads = self._load
        rooms = self._room
        node = leaf + self._size
        loads[node] = load if room >= 0 else INFINITE_LOAD
        rooms[node] = room if room >= 0 else -1

        while node > 1:
            sibling = node ^ 1
            low = loads[node] if loads[node] <= loads[sibling] else loads[sibling]
            most = rooms[node] if rooms[node] >= rooms[sibling] else rooms[sibling]
            node >>= 1
            if loads[node] == low and rooms[node] == most:
                return
            loads[node] = low
            rooms[node] = most

    def best(self, need: int) -> int | None:
        """The least loaded leaf with at least `need` tokens of room (ties: the lowest), None if there is none."""
        loads = self._load
        rooms = self._room
        if rooms[1] < need:
            return None

        found = None
        found_load = INFINITE_LOAD
        stack = [1]
        for _ in range(32 * self._size.bit_length()):
            if not stack:
                break

            node = stack.pop()
            if rooms[node] < need or loads[node] >= found_load:
                continue
            if node >= self._size:
                found = node - self._size
                found_load = loads[node]
                continue

            left = 2 * node
            stack += (left + 1, left) if loads[left] <= loads[left + 1] else (left, left + 1)
        return found if found is not None else self._roomiest()

    def _roomiest(self) -> int:
        node = 1
        while node < self._size:
            node = 2 * node if self._room[2 * node] >= self._room[2 * node + 1] else 2 * node + 1
        return node - self._size

    def _grow(self) -> None:
        leaves = list(zip(self._load[self._size :], self._room[self._size :], strict=True))
        self._size *= 2
        self._load = [INFINITE_LOAD] * (2 * self._size)
        self._room = [-1] * (2 * self._size)
        for leaf, (load, room) in enumerate(leaves):
            self.set(leaf, load, room)


class Waiting(Protocol):
    key: int  # also the order of arrival
    priority: int
    queued: bool


T = TypeVar("T", bound=Waiting)


class PriorityQueue(Generic[T]):
    """Waiting requests by (priority, arrival). What left the queue is dropped lazily, at constant amortised cost.

    What left it and came back under another key stands where that key says: its old place is nobody's.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, T]] = []
        self._aside: list[T] = []
        self._compact_at = 64

    def push(self, request: T) -> None:
        heapq.heappush(self._heap, (request.priority, request.key, request))
        if len(self._heap) > self._compact_at:
            waiting = {entry[1]: entry for entry in self._heap if _holds(entry)}
            self._heap = list(waiting.values())
            heapq.heapify(self._heap)
            self._compact_at = 2 * len(self._heap) + 64

    def head(self) -> T | None:
        while self._heap and not _holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def set_head_aside(self) -> None:
        """Take the head of the queue aside: it blocks nobody until `recall`.

        What left and came back under its own key before its old entry was dropped stands in the queue twice.
        """
        request = heapq.heappop(self._heap)[2]
        while self._heap and self._heap[0][2] is request:
            heapq.heappop(self._heap)
        self._aside.append(request)

    def recall(self) -> None:
        """What was set aside stands in its old place again."""
        for request in self._aside:
            self.push(request)
        self._aside.clear()


def _holds(entry: tuple[int, int, Waiting]) -> bool:
    """Whether its request waits in this place."""
    _, key, request = entry
    return request.queued and request.key == key

"""Environment servers and their credit: a ticket takes one, its end gives it back."""

from __future__ import annotations

from collections import deque


class Server:
    __slots__ = ("alive", "capacity", "in_ring", "incarnation", "index", "live")

    def __init__(self, index: int, incarnation: int, capacity: int) -> None:
        self.index, self.incarnation, self.capacity = index, incarnation, capacity
        self.alive = True
        self.in_ring = False
        self.live: set[int] = set()  # tickets


class Servers:
    """Servers with credit take turns; every operation is O(1) in servers and tickets."""

    def __init__(self) -> None:
        self.by_index: dict[int, Server] = {}
        self.outstanding = 0
        self._ring: deque[Server] = deque()  # may hold servers that lost their credit since
        self._dead: dict[int, int] = {}  # newest incarnation that was fenced, by index

    def is_dead(self, index: int, incarnation: int) -> bool:
        return incarnation <= self._dead.get(index, -1)

    def join(self, index: int, incarnation: int, capacity: int) -> None:
        server = self.by_index.get(index)
        if server is None:
            server = self.by_index[index] = Server(index, incarnation, capacity)
        server.capacity = capacity
        self._offer(server)

    def leave(self, index: int, incarnation: int) -> list[int]:
        """The tickets that the dead server held, in order of issue."""
        self._dead[index] = max(incarnation, self._dead.get(index, -1))
        server = self.by_index.get(index)
        if server is None or server.incarnation > incarnation:
            return []
        del self.by_index[index]
        server.alive = False
        return sorted(server.live)

    def next(self) -> Server | None:
        """A server with credit, or None."""
        while self._ring:
            server = self._ring[0]
            if server.alive and len(server.live) < server.capacity:
                self._ring.rotate(-1)
                return server
            server.in_ring = False
            self._ring.popleft()
        return None

    def take(self, server: Server, ticket_id: int) -> None:
        server.live.add(ticket_id)
        self.outstanding += 1

    def give_back(self, index: int, ticket_id: int) -> None:
        self.outstanding -= 1
        server = self.by_index.get(index)
        if server is not None:
            server.live.discard(ticket_id)
            self._offer(server)

    def _offer(self, server: Server) -> None:
        if not server.in_ring and len(server.live) < server.capacity:
            server.in_ring = True
            self._ring.append(server)

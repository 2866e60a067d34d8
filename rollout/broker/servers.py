"""Environment servers and their seats: a ticket takes one, its end gives it back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollout.broker.actions import RevokeTickets


@dataclass(slots=True, eq=False)
class Server:
    index: int
    incarnation: int
    capacity: int  # seats: tickets at once
    alive: bool = True
    suspended: bool = False  # a hook keeps tickets from it
    in_ring: bool = False
    live: set[int] = field(default_factory=set)  # tickets

    @property
    def has_seat(self) -> bool:
        return self.alive and not self.suspended and len(self.live) < self.capacity


class Servers:
    """Servers with a free seat take turns; every operation is O(1) in servers and tickets."""

    def __init__(self) -> None:
        self.by_index: dict[int, Server] = {}
        self.outstanding = 0  # tickets
        self._ring: deque[Server] = deque()  # may hold servers that have none since
        self._revoked: dict[int, list[int]] = {}  # tickets by server, in this event
        self._dead: dict[int, int] = {}  # newest incarnation that was fenced, by index

    def is_dead(self, index: int, incarnation: int) -> bool:
        return incarnation <= self._dead.get(index, -1)

    def join(self, index: int, incarnation: int, capacity: int) -> bool:
        """Add a server; True if it is new. It gets tickets once it has been offered."""
        server = self.by_index.get(index)
        if server is not None:
            server.capacity = capacity
            return False
        self.by_index[index] = Server(index, incarnation, capacity)
        return True

    def leave(self, index: int, incarnation: int) -> list[int] | None:
        """The tickets that the dead server held, in order of issue; None if it was not in service."""
        self._dead[index] = max(incarnation, self._dead.get(index, -1))
        server = self.by_index.get(index)
        if server is None or server.incarnation > incarnation:
            return None
        del self.by_index[index]
        server.alive = False
        return sorted(server.live)

    def next(self, avoid: int = -1) -> Server | None:
        """A server with a free seat other than `avoid`, or None."""
        avoided = False
        while self._ring:
            server = self._ring[0]
            if not server.has_seat:
                server.in_ring = False
                self._ring.popleft()
                continue

            if server.index == avoid and avoided:
                return None
            self._ring.rotate(-1)
            if server.index != avoid:
                return server
            avoided = True
        return None

    def suspend(self, index: int, suspended: bool) -> None:
        self.by_index[index].suspended = suspended
        self.offer(index)

    def take(self, server: Server, ticket_id: int) -> None:
        server.live.add(ticket_id)
        self.outstanding += 1

    def give_back(self, index: int, ticket_id: int) -> None:
        self.outstanding -= 1
        server = self.by_index.get(index)
        if server is not None:
            server.live.discard(ticket_id)
            self.offer(index)

    def revoke(self, index: int, ticket_id: int) -> None:
        self._revoked.setdefault(index, []).append(ticket_id)

    def revocations(self) -> list[RevokeTickets]:
        """What was revoked since the last call, one action a server."""
        if not self._revoked:
            return []
        revoked = [RevokeTickets(server, ticket_ids) for server, ticket_ids in self._revoked.items()]
        self._revoked = {}
        return revoked

    def offer(self, index: int) -> None:
        """Let a server with a free seat take its turn."""
        server = self.by_index[index]
        if not server.in_ring and server.has_seat:
            server.in_ring = True
            self._ring.append(server)

"""Environment servers: their credit (a ticket takes one, its end gives it back) and their quarantine.

A server that fails `limit` episodes in a row gets no tickets for a while, twice as long each time until it has
finished one; after it a single further failure sends it back. A death that takes episodes with it is one failure. The
index is the server: its next incarnation goes on with the count, and serves the rest of a quarantine. The last
server in service is never sent: it may be the tasks that fail.
"""

from __future__ import annotations

import heapq
from collections import deque


class Server:
    __slots__ = (
        "alive", "capacity", "failures", "in_ring", "incarnation", "index", "live", "quarantined", "sentences", "until",
    )  # fmt: skip

    def __init__(self, index: int, incarnation: int, capacity: int) -> None:
        self.index, self.incarnation, self.capacity = index, incarnation, capacity
        self.alive = True
        self.in_ring = False
        self.quarantined = False
        self.failures = 0  # in a row
        self.sentences = 0  # in a row
        self.until = 0.0  # end of its last quarantine, seconds
        self.live: set[int] = set()  # tickets


class Servers:
    """Servers with credit take turns; every operation is O(1) in servers and tickets."""

    def __init__(self, limit: int = 0, quarantine_s: float = 30.0) -> None:
        self.by_index: dict[int, Server] = {}
        self.quarantines = 0  # ever
        self._limit, self._quarantine_s = limit, quarantine_s  # limit 0: off
        self._quarantined: list[tuple[float, int, int]] = []  # heap of (end, index, incarnation)
        self._in_quarantine = 0
        self.outstanding = 0
        self._ring: deque[Server] = deque()  # may hold servers that lost their credit since
        self._dead: dict[int, int] = {}  # newest incarnation that was fenced, by index
        self._past: dict[int, Server] = {}  # the last one that died, by index

    def is_dead(self, index: int, incarnation: int) -> bool:
        return incarnation <= self._dead.get(index, -1)

    def join(self, index: int, incarnation: int, capacity: int, now: float) -> None:
        server = self.by_index.get(index)
        if server is None:
            server = self.by_index[index] = Server(index, incarnation, capacity)
            past = self._past.pop(index, None)
            if past is not None:
                self._inherit(server, past, now)
        server.capacity = capacity
        self._offer(server)

    def _inherit(self, server: Server, past: Server, now: float) -> None:
        """A new incarnation is judged by what became of the ones before."""
        server.failures, server.sentences, server.until = past.failures, past.sentences, past.until
        if server.until > now and not self._is_last():
            self._confine(server, server.until)
        elif server.failures:
            self._judge(server, now)

    def leave(self, index: int, incarnation: int) -> list[int]:
        """The tickets that the dead server held, in order of issue."""
        self._dead[index] = max(incarnation, self._dead.get(index, -1))
        server = self.by_index.get(index)
        if server is None or server.incarnation > incarnation:
            return []
        del self.by_index[index]
        server.alive = False
        if self._limit:
            server.failures += bool(server.live) and not server.quarantined
            self._past[index] = server
        self._in_quarantine -= server.quarantined
        return sorted(server.live)

    def next(self, avoid: int = -1) -> Server | None:
        """A server with credit other than `avoid`, or None."""
        avoided = False
        while self._ring:
            server = self._ring[0]
            if not self._open(server):
                server.in_ring = False
                self._ring.popleft()
            elif server.index != avoid:
                self._ring.rotate(-1)
                return server
            elif avoided:
                return None
            else:
                avoided = True
                self._ring.rotate(-1)
        return None

    def succeeded(self, index: int) -> None:
        server = self.by_index.get(index)
        if server is not None:
            server.failures = server.sentences = 0

    def failed(self, index: int, now: float) -> None:
        """An episode has failed by the server's fault, as far as can be known."""
        server = self.by_index.get(index)
        if not self._limit or server is None or server.quarantined:
            return
        server.failures += 1
        self._judge(server, now)

    def _judge(self, server: Server, now: float) -> None:
        if (server.failures < self._limit and not server.sentences) or self._is_last():
            return
        server.failures = 0
        self.quarantines += 1
        self._confine(server, now + self._quarantine_s * 2.0 ** min(server.sentences, 10))
        server.sentences += 1

    def _is_last(self) -> bool:
        return len(self.by_index) - self._in_quarantine <= 1

    def _confine(self, server: Server, until: float) -> None:
        server.quarantined, server.until = True, until
        self._in_quarantine += 1
        heapq.heappush(self._quarantined, (until, server.index, server.incarnation))

    def release(self, now: float) -> None:
        """Whose quarantine is over may have tickets again."""
        while self._quarantined and self._quarantined[0][0] <= now:
            _, index, incarnation = heapq.heappop(self._quarantined)
            server = self.by_index.get(index)
            if server is not None and server.incarnation == incarnation:
                server.quarantined = False
                self._in_quarantine -= 1
                self._offer(server)

    def next_release(self) -> float | None:
        return self._quarantined[0][0] if self._quarantined else None

    @staticmethod
    def _open(server: Server) -> bool:
        return server.alive and not server.quarantined and len(server.live) < server.capacity

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
        if not server.in_ring and self._open(server):
            server.in_ring = True
            self._ring.append(server)

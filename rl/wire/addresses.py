"""Where the sockets of a run are, as far as one process knows.

A process that binds a socket says so to the supervisor (`Register`), and so does one that looks for a socket. The
supervisor keeps the book (`launch/launcher/address_book.py`), and tells of each socket those who look for it. When
whoever bound it has died, its place is unknown until its successor binds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from rl.wire.messages import PeerDied, PeerListens


class Addresses:
    """The addresses that one process knows. Any thread may use them."""

    def __init__(self) -> None:
        self.host: str | None = None
        """Where this process binds, if its launcher has said so."""
        self.ports: dict[str, int] = {}
        """The ports at which this process is known already, by socket; others are free ones."""
        self.changes = 0
        """Grows whenever `find` may have another answer."""
        self._lock = threading.Lock()
        self._own: dict[str, str] = {}
        self._needs: set[str] = set()
        self._known: dict[str, tuple[PeerListens | None, str]] = {}
        self._heard: set[Callable[[], None]] = set()
        self._asks: Callable[[], None] = lambda: None

    def bound(self, name: str, endpoint: str) -> None:
        """A socket of this process, for others to find."""
        with self._lock:
            self._own[name] = endpoint
        self._asks()
        self._changed()

    def give(self, endpoints: dict[str, str]) -> None:
        """What is known otherwise: by the command line, or from the process that began this one."""
        with self._lock:
            self._known |= {name: (None, endpoint) for name, endpoint in endpoints.items()}
        self._changed()

    def find(self, name: str) -> str | None:
        """The endpoint of a socket, where it is known. Otherwise the supervisor is asked, who will tell."""
        with self._lock:
            if name in self._own:
                return self._own[name]
            if name in self._known:
                return self._known[name][1]
            is_new = name not in self._needs
            self._needs.add(name)
        if is_new:
            self._asks()
        return None

    def wait_for(self, name: str, deadline_s: float) -> str | None:
        """The endpoint of a socket, once it is known; None if that is too late."""
        changed = threading.Event()
        self.watch(changed.set)
        until = time.monotonic() + deadline_s
        try:
            while (found := self.find(name)) is None and changed.wait(until - time.monotonic()):
                changed.clear()
        finally:
            self.unwatch(changed.set)
        return found

    # ------------------------------------------------------------ for the control socket

    def on_questions(self, call: Callable[[], None]) -> None:
        """`call` is called when `questions` has something new."""
        self._asks = call

    def questions(self) -> tuple[dict[str, str], list[str]]:
        """What `Register` says: the sockets of this process, and those that it looks for."""
        with self._lock:
            return dict(self._own), sorted(self._needs)

    def learn(self, message: PeerListens) -> None:
        """Sockets of a peer."""
        with self._lock:
            self._known |= {name: (message, endpoint) for name, endpoint in message.listens.items()}
        self._changed()

    def forget(self, died: PeerDied) -> None:
        """Forget the addresses of a dead process: nobody listens where that process did, and whoever connects anew
        waits for its successor."""
        with self._lock:
            self._known = {name: known for name, known in self._known.items() if not _is_of(known[0], died)}
        self._changed()

    def watch(self, call: Callable[[], None]) -> None:
        """`call` is called after each change, by the thread that hears of it."""
        with self._lock:
            self._heard.add(call)

    def unwatch(self, call: Callable[[], None]) -> None:
        with self._lock:
            self._heard.discard(call)

    def _changed(self) -> None:
        with self._lock:
            self.changes += 1
            calls = list(self._heard)
        for call in calls:
            call()


def _is_of(peer: PeerListens | None, died: PeerDied) -> bool:
    """Whether that process is the dead one, or one before it."""
    if peer is None or (peer.role, peer.index) != (died.role, died.index):
        return False
    return peer.incarnation <= died.incarnation

"""A receiver of weights that needs no learner."""

from __future__ import annotations

import threading
from typing import Any

from rl.weights.channel import Receiver
from rl.wire.messages import Version


class FakeReceiver(Receiver):
    """Version 0 is published from the start; `torn` versions are to be taken again; `fail` breaks the next one."""

    def __init__(self) -> None:
        self.newest = Version(0, 0)
        self.digest = 1000
        self.torn = self.taken = 0
        self.fail = ""
        self.closed = False
        self._published = threading.Condition()

    def publish(self, version: Version) -> None:
        with self._published:
            self.newest = version
            self.digest = 1000 + version.n
            self._published.notify_all()

    def take(self, at_least: Version, deadline_s: float) -> tuple[Version, list[tuple[str, Any]]]:
        if self.fail:
            raise OSError(self.fail)
        with self._published:
            if not self._published.wait_for(lambda: self.newest >= at_least, deadline_s):
                raise TimeoutError(f"version {at_least.n} was not published")
            self.taken += 1
            return self.newest, []

    def receipt(self) -> int:
        return self.digest

    def release(self) -> bool:
        self.torn -= 1
        return self.torn < 0

    def close(self) -> None:
        self.closed = True

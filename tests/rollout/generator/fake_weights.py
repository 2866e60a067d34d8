"""A weight reader that needs no learner."""

from __future__ import annotations

import threading

from rl.weights import Manifest
from rl.wire.messages import Version


class FakeReader:
    """Version 0 is published from the start; `torn` leases are to be taken again; `fail` breaks the next one."""

    manifest = Manifest((), 8)
    progress = 0

    def __init__(self) -> None:
        self.newest = Version(0, 0)
        self.digest = 1000
        self.torn = self.leases = 0
        self.fail = ""
        self.closed = False
        self._published = threading.Condition()

    def publish(self, version: Version) -> None:
        with self._published:
            self.newest = version
            self.digest = 1000 + version.n
            self._published.notify_all()

    def open(self, deadline_s: float) -> None: ...

    def lease(self, at_least: Version, deadline_s: float) -> tuple[Version, memoryview]:
        if self.fail:
            raise OSError(self.fail)
        with self._published:
            if not self._published.wait_for(lambda: self.newest >= at_least, deadline_s):
                raise TimeoutError(f"version {at_least.n} was not published")
            self.leases += 1
            return self.newest, memoryview(b"12345678")

    def checksum(self) -> int:
        return self.digest

    def release(self) -> bool:
        self.torn -= 1
        return self.torn < 0

    def close(self) -> None:
        self.closed = True

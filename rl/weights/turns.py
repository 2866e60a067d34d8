"""`placement=alternate`: whose turn it is on the devices that engines share with the learner.

It is a lock of the kernel's on a file of the run. Engines hold it together, each from before its start until it rests.
The learner's first rank holds it alone, for all ranks. So nobody can be mistaken: whatever was told, lost or late, no
engine starts or wakes while the learner has it, and the other way round. It is let go of when its process ends, and all
processes forked from that one. When the first rank dies, the others follow within moments, in which an engine may begin
to start.

That somebody else wants it is said by messages (`updater.py`).
"""

from __future__ import annotations

import fcntl
import os

from rl.wire.run import RunFile

POLL_S = 0.02
"""Between two looks at whether it is free."""


class Turns:
    """`alone`: for the learner."""

    def __init__(self, run: RunFile, *, alone: bool) -> None:
        self._file = os.open(run.socket_folder / "turns", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
        self.has = False

    def take(self) -> bool:
        """Whether it could be had, or is had already; without a wait."""
        if not self.has:
            try:
                fcntl.flock(self._file, self._how | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            self.has = True
        return True

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self.has = False

    def close(self) -> None:
        os.close(self._file)

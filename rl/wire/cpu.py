"""What a process does on CPUs only, where all processes of a run share few cores."""

from __future__ import annotations

import contextlib
import os

FORKED_VARIABLE = "FRESCO_FORKED"
"""Set in processes that began as copies of a fork server: they may fork again, because nothing has run in them."""


def wake_without_pushing() -> None:
    """What wakes up waits until whoever has the core has no more to do, or its time is over (Linux, SCHED_BATCH).

    This holds for this thread, and for the threads and children that it begins later. It is for processes that share
    few cores. There the reader of a message else takes the core from the writer of the next ones. An engine then runs a
    step for each request instead of one for all of them, and every process pays for a turn of its loop for each
    message.
    """
    with contextlib.suppress(PermissionError):  # a container may forbid it, and nothing depends on it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

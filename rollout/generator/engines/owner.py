"""vLLM leaves its processes running when the generator that started them is killed: what ends them then."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading

OWNER_VARIABLE = "FRESCO_GENERATOR_PID"


def die_with_owner() -> None:
    """To be called in a process below the generator, as early as can be; in any other process it does nothing."""
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is not None and int(owner) != os.getpid():
        threading.Thread(target=_watch, args=(int(owner),), name="owner", daemon=True).start()


def _watch(generator_pid: int) -> None:
    """Kill this process, and the engine process above it if there is one, when the generator has ended.

    A pidfd and not PR_SET_PDEATHSIG: tensor-parallel workers are grandchildren of the generator.
    """
    parent = os.getppid()
    with contextlib.suppress(ProcessLookupError):  # it ended while this process began
        poll = select.poll()
        poll.register(os.pidfd_open(generator_pid), select.POLLIN)
        poll.poll()

    if parent not in (1, generator_pid) and os.getppid() == parent:
        os.kill(parent, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

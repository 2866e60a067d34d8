"""Which errors end a run, and which are the death of a process that is replaced."""

from __future__ import annotations

import errno

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""A full disk, a quota that is used up, a file system that has become read-only: so they are for every process."""

ENDS_RUN = 2
"""The exit code of a process that could not begin, and whose successor could not either: one line of its log says why.
"""


class EndsRun(Exception):
    """Base of errors that a process which is started again would meet again, and of verdicts on the run as a whole."""

    one_line = False
    """Whether one line tells of it: its message says all; a traceback would only hide it."""


def ends_run(error: BaseException) -> bool:
    """Whether whoever is started again would meet the error again."""
    return isinstance(error, EndsRun) or cannot_write(error)


def cannot_write(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in CANNOT_WRITE


class EngineDied(RuntimeError):
    """What ended an engine. Every call that fails because of it raises this, and never what it met itself."""

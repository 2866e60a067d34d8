"""Which errors end a run, and which are the death of a process that is replaced."""

from __future__ import annotations

import errno


class EndsRun(Exception):
    """Base of errors that a process which is started again would meet again, and of verdicts on the run as a whole."""

    one_line = False
    """Its message says all; a traceback would only hide it."""


def ends_run(error: BaseException) -> bool:
    """A full disk is one for all."""
    return isinstance(error, EndsRun) or (isinstance(error, OSError) and error.errno == errno.ENOSPC)

"""A verifier: two answers in, a bool out, by SymPy's exact algebra.

A comparison may use so many CPU seconds of its process: a verdict must not depend on what else the machine does. Then
the kernel ends the process, because an algebra system that is interrupted anywhere may answer wrong later.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys

from envs.math.answers import Symbolic, decide, typed
from envs.math.values import Judge
from envs.workers.serving import begin_worker, serve

MEMORY_BYTES = 4 << 30  # address space of a worker: a bomb ends as MemoryError


def main(descriptor: int, cpu_s: float) -> None:
    replies = begin_worker()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    from envs.math import algebra

    def equal(question: Symbolic) -> bool:
        same_form = typed(question.gold, question.asked).same_form
        by = Judge(algebra.equal, algebra.proportional, same_form)
        return decide(question.gold, question.answer, by, question.asked) is True

    def answered(_: int, question: Symbolic | None) -> bool:
        assert question is not None  # a verifier keeps no state, and hears of no end
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            return equal(question)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    equal(Symbolic("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}"))  # loads what is loaded lazily
    serve(replies, descriptor, Symbolic, answered)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

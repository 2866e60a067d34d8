"""A verifier: math-verify, two bare LaTeX expressions in, a bool out.

A comparison may use so many CPU seconds of its process: a verdict must not depend on what else the machine does. Then
the kernel ends the process, because a parser or an algebra system that is interrupted anywhere may answer wrong later.
The alarms of math-verify, which count by the clock, are off.
"""

from __future__ import annotations

import logging
import resource
import signal
import sys
from typing import Any

from envs.math.answers import Symbolic
from envs.workers.serving import begin_worker, serve

MEMORY_BYTES = 4 << 30  # address space of a worker: a bomb ends as MemoryError, a wrong answer
DIGITS = 12  # decimals that must agree where one side is a decimal number


def main(descriptor: int, cpu_s: float) -> None:
    replies = begin_worker()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify

    untimed: dict[str, Any] = {"parsing_timeout": None}  # typed as an int there
    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> list[Any]:
        found: list[Any] = parse(f"\\boxed{{{text}}}", extraction, fallback_mode="no_fallback", **untimed)
        return found

    def equal(question: Symbolic) -> bool:
        try:
            gold = parsed(question.gold)
            answer = parsed(question.answer)
            return bool(gold and answer) and verify(gold, answer, float_rounding=DIGITS, timeout_seconds=None)
        except Exception:
            return False

    def answered(_: int, question: Symbolic | None) -> bool:
        assert question is not None  # a verifier keeps no state, and hears of no end
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        correct = equal(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        return correct

    equal(Symbolic("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}"))  # loads what is loaded lazily
    serve(replies, descriptor, Symbolic, answered)


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))

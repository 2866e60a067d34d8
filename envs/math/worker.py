"""A verifier: math-verify in the main thread (it needs `signal.alarm`), two bare LaTeX expressions in, a bool out.

The server kills what hangs: an alarm does not interrupt a single long operation on big integers.
"""

from __future__ import annotations

import logging
import resource
import sys
from typing import Any

from envs.math.answers import Symbolic
from envs.workers.serving import begin_worker, serve

MEMORY_BYTES = 4 << 30  # address space of a worker: a bomb ends as MemoryError, a wrong answer
DIGITS = 12  # decimals that must agree where one side is a decimal number
STEP_S = 1  # alarm on parsing, and on each comparison


def main(descriptor: int) -> None:
    replies = begin_worker()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> list[Any]:
        found: list[Any] = parse(f"\\boxed{{{text}}}", extraction, fallback_mode="no_fallback", parsing_timeout=STEP_S)
        return found

    def equal(_: int, question: Symbolic | None) -> bool:
        assert question is not None  # a verifier keeps no state, and hears of no end
        try:
            gold = parsed(question.gold)
            answer = parsed(question.answer)
            return bool(gold and answer) and verify(gold, answer, float_rounding=DIGITS, timeout_seconds=STEP_S)
        except (Exception, TimeoutException):
            return False

    equal(0, Symbolic("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}"))  # loads what is loaded lazily
    serve(replies, descriptor, Symbolic, equal)


if __name__ == "__main__":
    main(int(sys.argv[1]))

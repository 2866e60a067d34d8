"""One verifier process: math-verify in its main thread (it needs `signal.alarm`), JSON lines on stdin and stdout.

Request `{"gold": …, "answer": …}`, both bare LaTeX; reply `true` or `false`. The first line out is `"ready"`.
The parent kills what hangs: an alarm does not interrupt a single long operation on big integers.
"""

from __future__ import annotations

import logging
import os
import resource
import signal
import sys

import msgspec

from envs.math.answers import Symbolic
from rl.core.process import die_with_parent

MEMORY_BYTES = 4 << 30  # address space of a worker: a bomb ends as MemoryError, a wrong answer
DIGITS = 12  # decimals that must agree where one side is a decimal number
STEP_S = 1  # alarm on parsing, and on each comparison


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    logging.disable(logging.CRITICAL)
    from math_verify import LatexExtractionConfig, parse, verify
    from math_verify.errors import TimeoutException

    extraction = [LatexExtractionConfig(boxed_match_priority=0)]

    def parsed(text: str) -> list:
        return parse(f"\\boxed{{{text}}}", extraction, fallback_mode="no_fallback", parsing_timeout=STEP_S)

    def equal(question: Symbolic) -> bool:
        try:
            gold, answer = parsed(question.gold), parsed(question.answer)
            return bool(gold and answer) and verify(gold, answer, float_rounding=DIGITS, timeout_seconds=STEP_S)
        except (Exception, TimeoutException):
            return False

    def reply(value: object) -> None:
        replies.write(msgspec.json.encode(value) + b"\n")
        replies.flush()

    equal(Symbolic("\\sqrt{2}", "\\frac{2}{\\sqrt{2}}"))  # loads what is loaded lazily
    reply("ready")
    decoder = msgspec.json.Decoder(Symbolic)
    for line in sys.stdin.buffer:
        reply(equal(decoder.decode(line)))


if __name__ == "__main__":
    main()

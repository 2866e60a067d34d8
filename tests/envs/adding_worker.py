"""A worker for the tests of pools: every session is a list of words; some words hang it, kill it or are refused.

It ends while it starts as often as there are files in the folder of its second argument, and takes one each time.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from envs.workers.serving import begin_worker, serve


def main(descriptor: int, failures: Path | None) -> None:
    for failure in failures.iterdir() if failures else ():
        failure.unlink()
        sys.exit(3)
    replies = begin_worker()
    print("what a library prints is no reply")
    said: dict[int, list[str]] = {}

    def answer(session: int, word: str | None) -> list[str] | None:
        if word is None:
            said.pop(session, None)
            return None

        match word:
            case "hang":
                time.sleep(600)
            case "spin":
                _spin(600)
            case "spin for 4.5 s":
                _spin(4.5)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "spend":
                os.kill(os.getpid(), signal.SIGPROF)
            case "refuse":
                raise ValueError("not this word")
            case "pid":
                return [str(os.getpid())]
        said.setdefault(session, []).append(word)
        return said[session]

    serve(replies, descriptor, str, answer)


def _spin(seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]) if sys.argv[2:] else None)

"""A worker for the tests of pools: every session is a list of words; some words hang it, kill it or are refused."""

from __future__ import annotations

import os
import sys
import time

from envs.workers.serving import begin_worker, serve


def main(descriptor: int, fails: bool) -> None:
    if fails:
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
            case "die":
                os.kill(os.getpid(), 9)
            case "refuse":
                raise ValueError("not this word")
            case "pid":
                return [str(os.getpid())]
        said.setdefault(session, []).append(word)
        return said[session]

    serve(replies, descriptor, str, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), "fails" in sys.argv[2:])

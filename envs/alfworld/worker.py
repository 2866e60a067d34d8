"""One game worker: many live games in one process, driven one after another (the engine is not thread-safe).

Requests on stdin, replies on stdout, in the same order; the first reply has number 0 and says ready. While requests
wait, replies leave a few at a time: every write wakes the server, which costs both. Which request is worked on is in
`Position`, so that a hang is not laid to a game whose reply was held. Engines of ended episodes are used again: each
costs some 2 MB that can never be freed.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

from envs.alfworld.wire import CHUNK, Inbox, Position, Reply, Request, frame
from rl.core.process import die_with_parent

HELD = 8  # replies; of a long queue an eighth: less than its requests wait anyway


def main(position: Position, boards_kept: int, lists_commands: bool) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb", CHUNK)
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    from envs.alfworld.engine import Boards, Engine

    gc.set_threshold(50_000)  # a step makes and drops hundreds of objects: the default looks every few steps
    boards, live, idle = Boards(boards_kept), dict[int, Engine](), list[Engine]()

    def answer(request: Request) -> Reply:
        if request.op == "end":
            if (engine := live.pop(request.episode, None)) is not None:
                idle.append(engine)
            return Reply(request.seq)
        if request.op == "load":
            board = boards.get(Path(request.argument))
            engine = live[request.episode] = live.get(request.episode) or (idle.pop() if idle else Engine())
            seen = engine.load(board)
        else:
            seen = live[request.episode].step(request.argument)
        return Reply(request.seq, seen.text, seen.commands if lists_commands else (), seen.won, seen.admissible)

    def answered(request: Request) -> Reply:
        position.set(request.seq)
        try:
            return answer(request)
        except Exception as error:  # of this game; the others go on
            return Reply(request.seq, error=f"{type(error).__name__}: {error}")

    replies.write(frame(Reply(0)))
    replies.flush()
    inbox = Inbox(Request)
    while chunk := os.read(0, CHUNK):
        waiting = inbox.feed(chunk)
        held = max(HELD, len(waiting) // HELD)
        for number, request in enumerate(waiting, 1):
            replies.write(frame(answered(request)))
            if number % held == 0:
                replies.flush()
        replies.flush()


if __name__ == "__main__":
    main(Position(int(sys.argv[1])), int(sys.argv[2]), "commands" in sys.argv[3:])

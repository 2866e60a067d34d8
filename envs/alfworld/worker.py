"""One game worker: many live games in one process, driven one after another (the engine is not thread-safe).

Requests on stdin, replies on stdout, in the same order; the first reply has number 0 and says ready. Engines of ended
episodes are used again: each costs some 2 MB that can never be freed.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import msgspec

from envs.alfworld.wire import LENGTH, Reply, Request, frame
from rl.process import die_with_parent


def main(boards_kept: int, lists_commands: bool) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not look like a reply
    from envs.alfworld.engine import Boards, Engine

    boards, live, idle = Boards(boards_kept), dict[int, Engine](), list[Engine]()

    def answer(request: Request) -> Reply:
        if request.op == "end":
            if (engine := live.pop(request.episode, None)) is not None:
                idle.append(engine)
            return Reply(request.seq)
        if request.op == "load":
            board = boards.get(Path(request.argument))
            engine = live[request.episode] = live.get(request.episode) or (idle.pop() if idle else Engine())
            seen, admissible = engine.load(board), True
        else:
            engine = live[request.episode]
            admissible = engine.admits(request.argument)
            seen = engine.step(request.argument)
        return Reply(request.seq, seen.text, seen.commands if lists_commands else (), seen.won, admissible)

    def send(reply: Reply) -> None:
        replies.write(frame(reply))
        replies.flush()

    send(Reply(0))
    decoder = msgspec.msgpack.Decoder(Request)
    while head := sys.stdin.buffer.read(LENGTH.size):
        request = decoder.decode(sys.stdin.buffer.read(*LENGTH.unpack(head)))
        try:
            send(answer(request))
        except Exception as error:  # of this game; the others go on
            send(Reply(request.seq, error=f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    main(int(sys.argv[1]), "commands" in sys.argv[2:])

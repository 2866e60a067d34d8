"""A game worker: many live games in one process, driven one after another (the engine is not thread-safe).

Engines of ended episodes are used again: each costs some 2 MB that can never be freed.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

from envs.alfworld.requests import GameReply, GameRequest
from envs.workers.serving import begin_worker, serve


def main(descriptor: int, games_kept: int, lists_commands: bool) -> None:
    replies = begin_worker()
    from envs.alfworld.engine import Engine, GameCache

    gc.set_threshold(50_000)  # a step makes and drops hundreds of objects: the default looks every few steps
    game_cache = GameCache(games_kept)
    live: dict[int, Engine] = {}
    idle: list[Engine] = []

    def answer(session: int, request: GameRequest | None) -> GameReply | None:
        if request is None:
            if session in live:
                idle.append(live.pop(session))
            return None

        if request.op == "load":
            prepared = game_cache.get(Path(request.argument))
            engine = live[session] = live.get(session) or (idle.pop() if idle else Engine())
            seen = engine.load(prepared)
        else:
            seen = live[session].step(request.argument)
        return GameReply(seen.text, seen.commands if lists_commands else (), seen.won, seen.admissible)

    serve(replies, descriptor, GameRequest, answer, grouped=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), "commands" in sys.argv[3:])

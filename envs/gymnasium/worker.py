"""A Gymnasium worker: many live games in one process. Their steps block, and may hang or crash.

A game depends on its seed and the actions alone, so the pool can play one again in a new process.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from functools import cache
from typing import Any

import numpy as np

from envs.gymnasium import spaces
from envs.gymnasium.planning import best_actions, table_of
from envs.gymnasium.requests import GymReply, GymRequest
from envs.gymnasium.screen import plain
from envs.workers.serving import begin_worker, serve
from rl.config.plugins import search_folder


class Game:
    """One live game."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.env = make(settings)
        self.prints = settings["prints"]
        self.names = tuple(settings["actions"])
        self.seen: Any = None

    def reset(self, seed: int) -> GymReply:
        self.seen, _ = self.env.reset(seed=seed)
        return GymReply(self._text())

    def act(self, text: str) -> GymReply:
        try:
            action = spaces.parse(self.env.action_space, text, self.names)
        except ValueError as error:
            return GymReply(str(error), valid=False)
        self.seen, reward, ended, cut, _ = self.env.step(action)
        return GymReply(self._text(), float(reward), bool(ended), bool(cut))

    def gold(self, best: np.ndarray | None) -> GymReply:
        if best is None:
            return GymReply("")
        action = int(best[int(self.seen)])
        return GymReply(self.names[action] if self.names else str(action))

    def _text(self) -> str:
        if self.prints:
            return plain(str(self.env.render()))
        return self.seen if isinstance(self.seen, str) else spaces.show(self.seen)


def make(settings: dict[str, Any]) -> Any:
    import gymnasium

    mode: dict[str, Any] = {"render_mode": "ansi"} if settings["prints"] else {}
    return gymnasium.make(settings["id"], **mode, **settings["kwargs"])


def main(descriptor: int, settings: dict[str, Any]) -> None:
    replies = begin_worker()
    warnings.simplefilter("ignore")
    search_folder(os.getcwd())
    live: dict[int, Game] = {}

    @cache
    def best() -> np.ndarray | None:
        table = table_of(make(settings))
        return None if table is None else best_actions(table, settings["gold_discount"])

    def answer(session: int, request: GymRequest | None) -> GymReply | None:
        if request is None:
            if session in live:
                with contextlib.suppress(Exception):  # the episode has its result; the game must not take others down
                    live.pop(session).env.close()
            return None

        if request.op == "reset":
            live[session] = Game(settings)
            return live[session].reset(int(request.argument))
        if request.op == "act":
            return live[session].act(request.argument)
        return live[session].gold(best())

    serve(replies, descriptor, GymRequest, answer)


if __name__ == "__main__":
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
    main(int(sys.argv[1]), json.loads(sys.argv[2]))

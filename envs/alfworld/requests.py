"""What the environment asks of a game worker, and what it answers."""

from __future__ import annotations

from typing import Literal

import msgspec


class GameRequest(msgspec.Struct, array_like=True, frozen=True):
    """`argument`: of `load` the game file, of `step` the command."""

    op: Literal["load", "step"]
    argument: str


class GameReply(msgspec.Struct, array_like=True, frozen=True):
    text: str
    commands: tuple[str, ...]  # those admitted now, if the worker lists them
    won: bool
    admissible: bool  # the command changed the game's state or was at least understood

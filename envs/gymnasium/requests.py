"""What the environment asks of a Gymnasium worker, and what it answers."""

from __future__ import annotations

from typing import Literal

import msgspec


class GymRequest(msgspec.Struct, array_like=True, frozen=True):
    """`argument`: of `reset` the seed, of `act` the action as the model wrote it; `gold` has none."""

    op: Literal["reset", "act", "gold"]
    argument: str = ""


class GymReply(msgspec.Struct, array_like=True, frozen=True):
    """`text`: what is seen; of an action that is none (not `valid`) why; of `gold` the best action, or nothing."""

    text: str
    reward: float = 0.0
    ended: bool = False  # by the game
    cut: bool = False  # by its limit of time
    valid: bool = True

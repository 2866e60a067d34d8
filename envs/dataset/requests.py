"""What the environment asks of a reward worker, and what it answers."""

from __future__ import annotations

import msgspec


class ScoreRequest(msgspec.Struct, array_like=True, frozen=True):
    response: str
    row: str  # JSON


class ScoreReply(msgspec.Struct, array_like=True, frozen=True):
    """A value per reward function, in their order, None for no opinion; `error`: of the first one that failed."""

    values: list[float | None]
    error: str = ""

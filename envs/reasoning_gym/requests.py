"""What the environment asks of a reasoning-gym worker, and what it answers."""

from __future__ import annotations

import msgspec


class PuzzleRequest(msgspec.Struct, array_like=True, frozen=True):
    """Entry `index` of the data set that begins with `seed`; `answer`: to be scored, None: only the question."""

    seed: int
    index: int
    answer: str | None = None


class PuzzleReply(msgspec.Struct, array_like=True, frozen=True):
    question: str
    gold: str  # empty: the data set names none
    score: float = 0.0
    error: str = ""  # of the data set's own scoring

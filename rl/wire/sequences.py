"""The tokens of an episode with what stands beside them: parts of several messages (`rl/wire/messages.py`)."""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from rl.wire.columns import Accessor


class TokenColumns(Struct, frozen=True, kw_only=True):
    """A mapping of column to array, as `rl.wire.columns` declares them, with short names for the well-known ones."""

    columns: dict[str, np.ndarray]

    token_ids = Accessor[np.ndarray]()
    loss_mask = Accessor[np.ndarray]()
    logp_behavior = Accessor[np.ndarray]()
    policy_version = Accessor[np.ndarray]()


class Turn(Struct, frozen=True, array_like=True):
    """One generate -> step round. Positions index the token axis of its sequence."""

    start: int  # first generated token
    end: int  # one past the last generated token
    reward: float
    generate_s: float
    env_s: float
    finish_reason: str  # stop | length | abort
    generator: int


class TokenSequence(TokenColumns, frozen=True, kw_only=True):
    """T tokens, prompt and observations included (token in, token out), and the turns that generated some of them.

    `columns` holds every column of a token (T, ...), a turn (len(turns), ...) and the sequence (1, ...).
    """

    turns: list[Turn]
    shared: int = 0  # tokens at the start that an earlier sequence holds as well, and trains: they are masked here

    @property
    def oldest_version(self) -> int:
        """v(sample), the smallest version that sampled one of its tokens (F3); -1 when nothing was generated."""
        unsigned = self.policy_version.view(np.uint32)  # so that -1, of what was not generated, is the largest one
        return int(unsigned.min(initial=2**32 - 1).astype(np.int32))

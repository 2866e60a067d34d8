"""Token in, token out: a conversation as one growing sequence of ids.

    prompt · generated · glue · generated · glue · … · generated

Invariants: generated ids stand exactly as the engine sampled them (nothing is ever tokenised again);
`loss_mask` is 1 on them and nowhere else; `logp_behavior` and `policy_version` are theirs, 0 and -1 elsewhere.
Glue is everything between two turns: the end of the turn where the model did not write it (cut by length),
the environment's messages and the opening of the next turn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollout.episodes.environment import Message
from rollout.episodes.tokenizer import ConversationTokenizer


class Conversation:
    def __init__(self, tokenizer: ConversationTokenizer, messages: Sequence[Message]) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[np.ndarray] = []
        self._loss_mask: list[np.ndarray] = []
        self._logp: list[np.ndarray] = []
        self._version: list[np.ndarray] = []
        self._length = 0
        self._append_prompt(tokenizer.prompt(messages))

    def __len__(self) -> int:
        return self._length

    def context(self) -> np.ndarray:
        """All ids so far, (T,) int32; the array is never written again."""
        if len(self._token_ids) != 1:
            self._token_ids = [np.concatenate(self._token_ids)]
        return self._token_ids[0]

    def append_generated(self, token_ids: np.ndarray, logp: np.ndarray, policy_version: np.ndarray) -> tuple[int, int]:
        """Add what the engine sampled; its span [start, end). Raises ValueError if the arrays do not match."""
        if not token_ids.shape == logp.shape == policy_version.shape == (token_ids.size,):
            raise ValueError(f"{token_ids.shape} ids, {logp.shape} logprobs, {policy_version.shape} versions")
        start = self._length
        self._append(
            np.array(token_ids, np.int32), np.ones(token_ids.size, np.uint8),
            np.array(logp, np.float32), np.array(policy_version, np.int32),
        )  # fmt: skip
        return start, self._length

    def append_messages(self, messages: Sequence[Message], limit: int) -> bool:
        """Add the environment's answer and open the next turn; False, and nothing added, if that passes `limit` ids."""
        glue = self._tokenizer.glue(messages, last_id=int(self._token_ids[-1][-1]))
        if self._length + len(glue) > limit:
            return False
        self._append_prompt(glue)
        return True

    def text(self, start: int, end: int) -> str:
        """The decoded text of a span."""
        return self._tokenizer.decode(self.context()[start:end].tolist())

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(token_ids int32, loss_mask uint8, logp_behavior float32, policy_version int32), each (T,)."""
        parts = (self._token_ids, self._loss_mask, self._logp, self._version)
        token_ids, loss_mask, logp, version = (np.concatenate(part) for part in parts)
        return token_ids, loss_mask, logp, version

    def _append_prompt(self, ids: list[int]) -> None:
        size = len(ids)
        self._append(
            np.array(ids, np.int32), np.zeros(size, np.uint8), np.zeros(size, np.float32), np.full(size, -1, np.int32)
        )

    def _append(self, token_ids: np.ndarray, mask: np.ndarray, logp: np.ndarray, version: np.ndarray) -> None:
        self._token_ids.append(token_ids)
        self._loss_mask.append(mask)
        self._logp.append(logp)
        self._version.append(version)
        self._length += token_ids.size

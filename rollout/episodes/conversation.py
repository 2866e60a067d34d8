"""Token in, token out: a conversation as one growing sequence of ids.

    prompt · generated · glue · generated · glue · … · generated

Invariants: generated ids stand exactly as the engine sampled them (nothing is ever tokenised again); `loss_mask` is 1
on them and nowhere else; what else the generator answered stands beside them, and each column's masked value elsewhere.
Glue is everything between two turns: the end of the turn where the model did not write it (cut by length),
the environment's messages and the opening of the next turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.core.columns import COLUMNS, ONE_TURN, Scope, carried, declared, masked_columns, mismatch
from rl.core.messages import TokenSequence, Turn
from rollout.episodes.environment import ChatMessage
from rollout.episodes.tokenizer import ConversationTokenizer

Columns = Mapping[str, np.ndarray]


class Conversation:
    """One sequence in the making: `append_generated` once or more, `end_turn`, `append_messages`, and so on."""

    def __init__(self, tokenizer: ConversationTokenizer, messages: Sequence[ChatMessage]) -> None:
        self.turns: list[Turn] = []
        self._tokenizer = tokenizer
        self._parts: defaultdict[str, list[np.ndarray]] = defaultdict(list)  # by column, in order
        self._of_turn: dict[str, np.ndarray] = {}  # what the generator said of the turn under way
        self._length = 0
        self._append_read(tokenizer.prompt(messages))

    def __len__(self) -> int:
        return self._length

    def context(self) -> np.ndarray:
        """All ids so far, (T,) int32; the array is never written again."""
        ids = self._parts["token_ids"]
        if len(ids) != 1:
            ids[:] = [np.concatenate(ids)]
        return ids[0]

    def append_generated(self, reply: Columns) -> tuple[int, int]:
        """Add what the engine sampled, `Generated.columns`; its span [start, end).

        Raises ValueError if a column is missing, unknown or of another dtype or shape than the table says.
        """
        ids = reply.get("token_ids")
        size = 0 if ids is None else len(ids)
        if fault := mismatch(reply, {"token": size, **ONE_TURN}, "generator"):
            raise ValueError(fault)

        if size or not self._of_turn:  # a part that was aborted before its first token says nothing
            self._of_turn = {name: values for name, values in reply.items() if COLUMNS[name].scope != "token"}
        return self._append(size, {**reply, "loss_mask": np.ones(size, np.uint8)})

    def append_written(self, ids: Sequence[int]) -> tuple[int, int]:
        """Add a turn that no engine has sampled, such as a demonstrator's: masked values stand beside its ids."""
        made = masked_columns({"token": len(ids), **ONE_TURN}, "generator")
        return self.append_generated(made | {"token_ids": np.array(ids, np.int32)})

    def end_turn(self, turn: Turn, answered: Mapping[str, Any]) -> None:
        """Close the turn; `answered` is the environment's `Step.columns`, one entry of each. Raises ValueError."""
        of_turn = self._of_turn | {name: _one_entry(name, value) for name, value in answered.items()}
        if fault := mismatch({name: of_turn[name] for name in answered}, ONE_TURN, "environment"):
            raise ValueError(fault)

        self.turns.append(turn)
        self._of_turn = {}
        for name, values in of_turn.items():
            if COLUMNS[name].scope == "turn":
                self._parts[name].append(values)
            else:
                self._parts[name] = [values]  # of several turns the last one's

    def append_messages(self, messages: Sequence[ChatMessage], limit: int) -> bool:
        """Add the environment's answer and open the next turn; False, and nothing added, if that passes `limit` ids."""
        glue = self._tokenizer.glue(messages, last_id=int(self.context()[-1]))
        if self._length + len(glue) > limit:
            return False

        self._append_read(glue)
        return True

    def text(self, start: int, end: int) -> str:
        """The decoded text of a span."""
        return self._tokenizer.decode(self.context()[start:end].tolist())

    def sequence(self) -> TokenSequence:
        """All tokens and turns so far."""
        return TokenSequence(columns=self._joined("token", "turn", "sequence"), turns=self.turns)

    def sample_columns(self) -> dict[str, np.ndarray]:
        """What stands once for the sample, (1, ...) each."""
        return self._joined("sample")

    def _joined(self, *scopes: Scope) -> dict[str, np.ndarray]:
        return {column.name: np.concatenate(self._parts[column.name] or [column.full(0)]) for column in carried(scopes)}

    def _append_read(self, ids: list[int]) -> None:
        """Ids that the model reads and did not write."""
        self._append(len(ids), {"token_ids": np.array(ids, np.int32)})

    def _append(self, size: int, given: Columns) -> tuple[int, int]:
        for column in carried(["token"]):
            values = given.get(column.name)
            self._parts[column.name].append(column.full(size) if values is None else values)
        start = self._length
        self._length += size
        return start, self._length


def _one_entry(name: str, value: Any) -> np.ndarray:
    """(1, ...). Raises ValueError for a value that is not one entry of the column."""
    column = declared(name)
    try:
        return np.asarray(value, column.dtype).reshape(1, *column.shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r}: {error}") from None

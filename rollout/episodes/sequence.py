"""A token sequence in the making, and the sampling of a turn into it.

    read · generated · read · generated · …

Invariants: generated ids stand exactly as the engine sampled them (nothing is ever tokenised again); `loss_mask` is 1
on them and nowhere else; what else the generator answered stands beside them, and each column's masked value elsewhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.wire.columns import COLUMNS, ONE_TURN, Scope, carried, declared, mismatch
from rl.wire.messages import TokenSequence, Turn

Columns = Mapping[str, np.ndarray]


class GrowingSequence:
    """`append_read` what the model reads, `append_generated` once or more, `end_turn`, and so on."""

    def __init__(self, ids: Sequence[int] | np.ndarray) -> None:
        self.turns: list[Turn] = []
        self.newest_version = -1  # of the tokens so far
        self._parts: defaultdict[str, list[np.ndarray]] = defaultdict(list)  # by column, in order
        self._of_turn: dict[str, np.ndarray] = {}  # what the generator said of the turn under way
        self._length = 0
        self.append_read(ids)

    def __len__(self) -> int:
        return self._length

    def context(self) -> np.ndarray:
        """All ids so far, (T,) int32; the array is never written again."""
        ids = self._parts["token_ids"]
        if len(ids) != 1:
            ids[:] = [np.concatenate(ids)]
        return ids[0]

    def append_read(self, ids: Sequence[int] | np.ndarray) -> None:
        """Ids that the model reads and did not write."""
        self._append(len(ids), {"token_ids": np.array(ids, np.int32)})

    def append_generated(self, reply: Columns) -> tuple[int, int]:
        """Add what the engine sampled, `Generated.columns`; its span [start, end).

        Raises ValueError if a column is missing, unknown or of another dtype or shape than the table says.
        """
        ids = reply.get("token_ids")
        size = 0 if ids is None else len(ids)
        if fault := mismatch(reply, {"token": size, **ONE_TURN}, "generator"):
            raise ValueError(fault)

        if size:
            self.newest_version = max(self.newest_version, int(reply["policy_version"].max()))
        if size or not self._of_turn:  # a part that was aborted before its first token says nothing
            self._of_turn = {name: values for name, values in reply.items() if COLUMNS[name].scope != "token"}
        return self._append(size, {**reply, "loss_mask": np.ones(size, np.uint8)})

    def generated(self, start: int) -> dict[str, np.ndarray]:
        """What generators answered from this place to the end, as `append_generated` takes it."""
        names = [column.name for column in carried(["token"], "generator")]
        return {name: np.concatenate(self._parts[name])[start:] for name in names} | self._of_turn

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

    def sequence(self, shared: int = 0) -> TokenSequence:
        """All tokens and turns so far; `shared`: as many at the start belong to an earlier sequence."""
        return TokenSequence(columns=self._joined("token", "turn", "sequence"), turns=self.turns, shared=shared)

    def sample_columns(self) -> dict[str, np.ndarray]:
        """What stands once for the sample, (1, ...) each."""
        return self._joined("sample")

    def _joined(self, *scopes: Scope) -> dict[str, np.ndarray]:
        return {column.name: np.concatenate(self._parts[column.name] or [column.full(0)]) for column in carried(scopes)}

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
        return np.asarray(value, column.dtype).reshape(1, *column.entry_shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r}: {error}") from None

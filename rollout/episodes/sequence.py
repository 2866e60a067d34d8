"""A token sequence in the making, and the sampling of a turn into it.

    read · generated · read · generated · …

Invariants: generated ids stand exactly as the engine sampled them (nothing is ever tokenised again), and `loss_mask` is
1 on them and nowhere else. What else the generator answered stands beside them, and each column's masked value
elsewhere.

A context column (`rl/wire/columns.py`) also has entries for what was read. They come with the answer that follows it:
each brings those of the tokens since the answer before, `known` says how far they reach, and nothing comes twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl.wire.columns import (
    COLUMNS,
    ONE_TURN,
    Column,
    Scope,
    carried,
    context_columns,
    context_mismatch,
    declared,
    mismatch,
)
from rl.wire.messages import TokenSequence, Turn

Columns = Mapping[str, np.ndarray]


class GrowingSequence:
    """`append_read` what the model reads, `append_generated` once or more, `end_turn`, and so on."""

    def __init__(self, ids: Sequence[int] | np.ndarray, like: GrowingSequence | None = None) -> None:
        """like: one that begins with these ids, as far as it is as long; what is known of its context is known here."""
        self.turns: list[Turn] = []
        self.known = 0  # tokens at the start whose context columns are here
        self.newest_version = -1  # of the tokens so far
        self._parts: defaultdict[str, list[np.ndarray]] = defaultdict(list)  # by column, in order
        self._of_turn: dict[str, np.ndarray] = {}  # what the generator said of the turn under way
        self._length = 0
        self.append_read(ids)

        if like is not None:
            self.known = min(like.known, self._length)
            for column in context_columns():
                self._parts[column.name] = _cut(like._parts[column.name], 0, self._length)

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

    @property
    def lacks_context(self) -> bool:
        """Whether a context column has no entries for some of the tokens: the next answer will bring them."""
        return self.known < self._length and bool(context_columns())

    def append_generated(self, reply: Columns, context: Columns | None = None) -> tuple[int, int]:
        """Add what the engine sampled, `Generated.columns`; its span [start, end).

        context: `Generated.context`, of the tokens from `known` on; without it nothing is known of the new ones either.
        Raises ValueError if a column is missing, unknown or of another dtype or shape than the table says.
        """
        ids = reply.get("token_ids")
        size = 0 if ids is None else len(ids)
        if fault := mismatch(reply, {"token": size, **ONE_TURN}, "generator"):
            raise ValueError(fault)
        if context and (fault := context_mismatch(context, self._length - self.known)):
            raise ValueError(fault)

        if context:
            for column in context_columns():
                self._parts[column.name] += [context[column.name], reply[column.name]]
            self.known = self._length + size
        if size:
            self.newest_version = max(self.newest_version, int(reply["policy_version"].max()))
        if size or not self._of_turn:  # a part that was aborted before its first token says nothing
            self._of_turn = {name: values for name, values in reply.items() if COLUMNS[name].scope != "token"}
        return self._append(size, {**reply, "loss_mask": np.ones(size, np.uint8)})

    def generated(self, start: int) -> dict[str, np.ndarray]:
        """What generators answered from this place to the end, as `append_generated` takes it."""
        columns = carried(["token"], "generator")
        return {column.name: self._entries(column, start, self._length) for column in columns} | self._of_turn

    def context_entries(self, start: int, end: int) -> dict[str, np.ndarray]:
        """The context columns of the tokens [start, end), as `append_generated` takes them."""
        return {column.name: self._entries(column, start, end) for column in context_columns()}

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
        return {column.name: self._entries(column) for column in carried(scopes)}

    def _entries(self, column: Column, start: int = 0, end: int | None = None) -> np.ndarray:
        """The entries of the column's scope from `start` to `end`; masked ones stand where a context column has none
        yet."""
        parts = _cut(self._parts[column.name], start, end)
        if column.covers == "context":
            parts.append(column.full((self._length if end is None else end) - start - sum(map(len, parts))))
        return np.concatenate(parts or [column.full(0)])

    def _append(self, size: int, given: Columns) -> tuple[int, int]:
        for column in carried(["token"]):
            if column.covers == "context":
                continue
            values = given.get(column.name)
            self._parts[column.name].append(column.full(size) if values is None else values)
        start = self._length
        self._length += size
        return start, self._length


def _cut(parts: list[np.ndarray], start: int, end: int | None) -> list[np.ndarray]:
    """Entries [start, end) of arrays that follow each other, as views."""
    found = []
    for part in parts:
        found.append(part[max(start, 0) : None if end is None else max(end, 0)])
        start -= len(part)
        end = None if end is None else end - len(part)
    return [part for part in found if len(part)]


def _one_entry(name: str, value: Any) -> np.ndarray:
    """(1, ...). Raises ValueError for a value that is not one entry of the column."""
    column = declared(name)
    try:
        return np.asarray(value, column.dtype).reshape(1, *column.entry_shape)
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r}: {error}") from None

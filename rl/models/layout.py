"""What a forward needs to know of a pack, computed by numpy where the ids are still on the host.

A causal model's state at a token depends on nothing that comes after it. So sequences that begin alike share the states
of their beginning: whole samples, prompts with many answers and trees of turns are all one forest. Each of its
sequences is a segment: its own tokens, and before them a context of tokens that an earlier segment computes. The
gradients of all sequences add up in what they share, so the result is that of separate samples.

Nothing is computed that no log-probability reads, as the last token of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SEGMENT_TOKENS = 4
"""A segment with a context costs a call of its own on a CPU: about as much as so many tokens of a tiny model."""
COPIED_ROWS = 64
"""Keys and values that are copied, forward and backward, at the cost of one token of a tiny model; more of a large."""

T = TypeVar("T")
Ids = npt.NDArray[np.int64]
Entries = npt.NDArray[Any]  # (T,) of a sequence: its ids, or all that a forward reads of each token as one


@dataclass(frozen=True)
class Run:
    """`count` segments of one shape: `length` tokens, each of which sees `context` tokens and its own up to itself."""

    context: int
    length: int
    count: int


@dataclass(frozen=True)
class Spans:
    """The C tokens of a forward as n segments, those without a context first, short ones before long ones."""

    runs: tuple[Run, ...]
    keys: Tensor | None  # (K,) int64, which of the C each segment sees, one after another; None: its own, nothing else
    query_bounds: Tensor  # (n + 1,) int32, where the tokens of each segment begin
    key_bounds: Tensor  # (n + 1,) int32, likewise in `keys`
    longest_query: int
    longest_key: int
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)  # made once by `packed_attention`

    @property
    def tokens(self) -> int:
        """C"""
        return sum(run.length * run.count for run in self.runs)


@dataclass(frozen=True)
class Layout:
    """Which of a pack's T tokens a forward computes, and where their states are read.

    `part` (i, n): of ranks that compute the pack together, what rank i of n does; segments and generated tokens are
    those of the whole pack.
    """

    tokens: Tensor  # (C,) int64, places in the pack
    targets: Tensor  # (S,) int64, places of generated tokens with a context: all that have a number
    rows: Tensor  # (S,) int64, where the state before each target stands among the C
    generated: Tensor  # (L,) int64, places of all generated tokens
    segments: Spans
    part: tuple[int, int] = (0, 1)

    def cut(self, index: int, size: int) -> Layout:
        """What one of several ranks does of a whole layout: every size-th token, and the targets read there.

        All get as many tokens: the first one stands in for those that are missing at the end, and nothing reads it.
        """
        assert self.part == (0, 1), f"cut before, as {self.part}"
        fill = self.tokens[:1].expand(-len(self.tokens) % size)
        own = (self.rows % size == index).nonzero()[:, 0]
        return replace(
            self,
            tokens=torch.cat([self.tokens, fill])[index::size].contiguous(),
            targets=self.targets[own],
            rows=self.rows[own] // size,
            part=(index, size),
        )

    @property
    def counted(self) -> Tensor:
        """(L,) places of generated tokens for sums over all ranks: of a team's ranks one counts them."""
        return self.generated[: 0 if self.part[0] else None]


def placed(held: T, device: torch.device | str) -> T:
    """What holds tensors, a dataclass or a mapping, with all of them on the device.

    A copy to a GPU is only begun. From memory that is not locked it may wait for all that the GPU has to do.
    """
    value: Any = held
    if isinstance(value, Tensor):
        locked = value.is_cpu and torch.device(device).type == "cuda"
        value = (value.pin_memory() if locked else value).to(device, non_blocking=True)
    elif isinstance(value, dict):
        value = {name: placed(each, device) for name, each in value.items()}
    elif is_dataclass(value) and not isinstance(value, type):
        value = replace(value, **{each.name: placed(getattr(value, each.name), device) for each in fields(value)})

    moved: T = value
    return moved


def lay_out(read: Sequence[Entries], positions: Ids, mask: npt.NDArray[np.bool_]) -> Layout:
    """The layout of a pack, from its arrays on the host.

    read: (T, ...) each, the columns that a forward reads. A beginning is shared only where all of them are equal.
    positions (T,) begin at 0 with each sequence; mask (T,) is set on generated tokens. Raises ValueError for a pack
    that does not begin with a sequence.
    """
    starts = np.flatnonzero(positions == 0)
    if not len(starts) or starts[0]:
        raise ValueError("a pack begins with the first token of a sequence, at position 0")

    generated = np.flatnonzero(mask)
    targets = generated[positions[generated] > 0]
    lengths = _lengths(starts, targets)
    entries = joined(read)
    sequences = [entries[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    rows, contexts = _forest(sequences)
    shapes = [(context, len(own) - context) for context, own in zip(contexts, sequences, strict=True)]
    order = sorted((i for i, (_, length) in enumerate(shapes) if length), key=lambda i: shapes[i])

    # From the order in which the forest grew to that of the segments.
    grown = np.concatenate([rows[i][contexts[i] :] for i in order])
    final = np.empty(len(grown), np.int64)
    final[grown] = np.arange(len(grown))

    state = np.zeros(len(positions), np.int64)
    for start, own in zip(starts, rows, strict=True):
        state[start : start + len(own)] = final[own]

    shared = any(contexts[i] for i in order)
    return Layout(
        tokens=_tensor(np.concatenate([np.arange(contexts[i], len(rows[i])) + starts[i] for i in order])),
        targets=_tensor(targets),
        rows=_tensor(state[targets - 1]),
        generated=_tensor(generated),
        segments=_segments(
            [shapes[i] for i in order],
            _tensor(np.concatenate([final[rows[i]] for i in order])) if shared else None,
        ),
    )


def saved(before: Entries, own: Entries) -> int:
    """Tokens of the sequence `own` that need not be computed beside `before`; 0 where that would cost more.

    Saved are as many tokens as both begin with; the rest then is a segment with keys and values of its own.
    """
    length = min(len(before), len(own))
    differ = before[:length] != own[:length]
    common = int(differ.argmax()) if differ.any() else length
    is_worth = common == len(own) or common > SEGMENT_TOKENS + len(own) / COPIED_ROWS
    return common if is_worth else 0


def in_order(sequences: Sequence[Entries]) -> list[int]:
    """The sequences' indices, ordered so that each one's longest common beginning with any before is that with the one
    before."""
    return sorted(range(len(sequences)), key=lambda i: sequences[i].tobytes())


def _forest(sequences: Sequence[Entries]) -> tuple[list[Ids], list[int]]:
    """For each sequence: which computed token each of its tokens is, in the order that they are made; its context."""
    rows = [np.zeros(0, np.int64)] * len(sequences)
    contexts = [0] * len(sequences)
    made = 0
    before = -1

    for i in in_order(sequences):
        own = sequences[i]
        if before >= 0:
            contexts[i] = saved(sequences[before], own)
        end = made + len(own) - contexts[i]

        rows[i] = np.concatenate([rows[before][: contexts[i]], np.arange(made, end)])
        made = end
        before = i

    return rows, contexts


def _lengths(starts: Ids, targets: Ids) -> list[int]:
    """Tokens of each sequence before its last target, which alone are read; one at least in all."""
    # One more in front: the last target before each end.
    last = np.concatenate([[-1], targets])[np.searchsorted(targets, np.append(starts[1:], np.iinfo(np.int64).max))]
    lengths: list[int] = np.maximum(last - starts, 0).tolist()
    if not any(lengths):
        lengths[0] = 1  # a forward of a sharded model has to run
    return lengths


def joined(read: Sequence[Entries]) -> Entries:
    """(T,), equal where the entries (T, ...) of all columns are."""
    if len(read) == 1:
        return np.asarray(read[0], np.int64)
    rows = np.concatenate([np.ascontiguousarray(each).reshape(len(each), -1).view(np.uint8) for each in read], 1)
    return np.ascontiguousarray(rows).view(np.dtype((np.void, rows.shape[1])))[:, 0]


def whole_sequences(positions: Ids) -> Spans:
    """All tokens in their own order, each sequence for itself; positions (T,) begin at 0 with each."""
    bounds = np.append(np.flatnonzero(positions == 0), len(positions))
    return _segments([(0, length) for length in np.diff(bounds).tolist()], None)


def _segments(shapes: Sequence[tuple[int, int]], keys: Tensor | None) -> Spans:
    """shapes: tokens of the context, and of its own, of each segment."""
    queries = [length for _, length in shapes]
    seen = [context + length for context, length in shapes]
    return Spans(
        runs=tuple(Run(*shape, len(list(equal))) for shape, equal in groupby(shapes)),
        keys=keys,
        query_bounds=_bounds(queries),
        key_bounds=_bounds(seen),
        longest_query=max(queries),
        longest_key=max(seen),
    )


def _bounds(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))


def _tensor(array: Ids) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))

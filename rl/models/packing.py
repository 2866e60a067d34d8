"""Samples of a batch part as packs: flat, padding-free token axes of bounded length, one forward each.

Advantages, token weights and the token count are normalised over the batch, so they are computed from the whole batch
(`rl.learner.credit`). How samples are spread over packs, ranks and minibatches changes no gradient.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import get_args

import msgspec
import numpy as np
import torch
from torch import Tensor

from rl.models.layout import Entries, Layout, in_order, joined, lay_out, placed, saved
from rl.wire.columns import COLUMNS, Accessor, OptionalAccessor, Scope, declared, forward_columns, masked_columns
from rl.wire.messages import BatchPart

_WIDER = {np.dtype(np.int32): np.int64, np.dtype(np.uint16): np.int32}


@dataclass(frozen=True)
class Pack:
    """T tokens of n samples, one sample after another; the sequences of a sample, if it has several, side by side.

    So what a loss computes of a whole sample does not depend on the sequences into which its history forked.
    `columns` (T, ...) are those of the table (`rl.wire.columns`), whatever their scope: a turn's or a sample's entry
    stands at each of its tokens. Integers are int64, the mask bool. The learner's own join them as they are computed.
    """

    columns: dict[str, Tensor]
    position_ids: Tensor  # (T,) int64, restarting at 0 with each sequence
    sample: Tensor  # (T,) int64, 0 .. n - 1
    turn: Tensor  # (T,) int64, turn within the sample, by time; what is read belongs to the turn before it, if any
    rewards: Tensor  # (n,) float32
    members: tuple[int, ...]  # row of each sample in batch_part.rows; empty for a dummy
    layout: Layout | None = None  # of a forward; `laid_out` makes it

    token_ids = Accessor[Tensor]()  # (T,) int64
    loss_mask = Accessor[Tensor]()  # (T,) bool, true on generated tokens
    logp_behavior = Accessor[Tensor]()  # (T,) float32
    staleness = Accessor[Tensor]()  # (T,) int64, 0 where masked
    advantages = Accessor[Tensor]()  # (T,) float32
    token_weights = Accessor[Tensor]()  # (T,) float32, of the aggregation
    logp_proximal = OptionalAccessor[Tensor]()  # (T,) float32; `rl.learner.update.with_logp` adds this and the next
    logp_reference = OptionalAccessor[Tensor]()  # (T,) float32
    values = OptionalAccessor[Tensor]()  # (T,) float32; `rl.learner.update.with_values` adds it
    returns = OptionalAccessor[Tensor]()  # (T,) float32; `rl.learner.credit.assign` adds it for a critic

    @property
    def mask(self) -> Tensor:
        """(T,) bool: `loss_mask` by the name that losses know."""
        return self.loss_mask

    @property
    def tokens(self) -> int:
        return len(self.token_ids)

    @property
    def loss_tokens(self) -> int:
        return int(self.mask.sum())

    def with_columns(self, **columns: Tensor) -> Pack:
        """The pack with these columns (T, ...) added or replaced. Raises ValueError for one that is not in the
        table."""
        for name in columns:
            declared(name)
        kept = self.layout if columns.keys().isdisjoint((*_read(), "loss_mask")) else None
        return replace(self, columns=self.columns | columns, layout=kept)

    def laid_out(self, part: tuple[int, int] = (0, 1)) -> Pack:
        """The pack with its layout, or with the part of it that is given, if it has not been cut.

        Raises ValueError where the pack has left the host without one.
        """
        if self.layout is not None:
            return self if part in (self.layout.part, (0, 1)) else replace(self, layout=self.layout.cut(*part))
        if self.token_ids.device.type != "cpu":
            raise ValueError("a pack is laid out on the host: call `Pack.to` on the pack that `make_packs` made")
        columns = {name: self.columns[name].numpy() for name in _read() if name in self.columns}
        layout = lay_out(_decisive(columns), self.position_ids.numpy(), self.mask.numpy())
        return replace(self, layout=layout).laid_out(part)

    def to(self, device: torch.device | str) -> Pack:
        """The pack on the device, with its layout."""
        return placed(self.laid_out(), device)


def _read() -> tuple[str, ...]:
    """The columns that a forward reads: where they differ, no state can be shared."""
    return ("token_ids", *(column.name for column in forward_columns()))


def _decisive(columns: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """(T, ...) each: where all of them are equal, and were so before, two tokens have one state.

    An entry may be about its own token, or, as routed experts, about the position that predicted it: then the next one
    is about this state.
    """
    others = [columns[name] for name in _read()[1:] if name in columns]
    return [columns["token_ids"], *others, *(np.roll(each, -1, 0) for each in others)]


def make_packs(batch_part: BatchPart, max_tokens: int, version: int) -> list[Pack]:
    """This rank's samples in packs of at most `max_tokens`; a longer sample gets a pack of its own.

    `version` is the version being trained. The packs are deterministic. Advantages are 0 and token weights 1 until
    `credit.assign`. Samples with the same prompt stay together, and what they share counts once, because it is computed
    once.
    """
    columns = _spread(batch_part)
    ends = np.cumsum(batch_part.lengths, dtype=np.int64)
    spans = [slice(end - length, end) for length, end in zip(batch_part.lengths, ends, strict=True)]
    samples = [list(own) for _, own in groupby(range(len(batch_part.members)), batch_part.members.__getitem__)]

    entries = joined(_decisive(columns))
    sequences = [[entries[spans[i]] for i in own] for own in samples]
    families: dict[bytes, list[int]] = defaultdict(list)
    for k, own in enumerate(samples):
        families[columns["token_ids"][spans[own[0]]][: _prompt(batch_part, own[0])].tobytes()].append(k)

    parts = [part for family in families.values() for part in _cut(family, sequences, max_tokens)]
    packs = [
        [k for part in chosen for k in parts[part][1]] for chosen in assign([size for size, _ in parts], max_tokens)
    ]
    return [_pack(batch_part, columns, spans, [samples[k] for k in chosen], version) for chosen in packs]


def sequence_pack(*sequences: Sequence[int]) -> Pack:
    """Texts side by side, all of whose tokens count as generated: for their log-probabilities. None may be empty."""
    dummy = dummy_pack()
    lengths = torch.tensor([len(ids) for ids in sequences])
    tokens = int(lengths.sum())

    columns = {name: values.expand(tokens, *values.shape[1:]) for name, values in dummy.columns.items()}
    columns["token_ids"] = torch.cat([torch.tensor(ids, dtype=torch.int64) for ids in sequences])
    columns["loss_mask"] = torch.ones(tokens, dtype=torch.bool)

    return Pack(
        columns,
        position_ids=torch.cat([torch.arange(len(ids)) for ids in sequences]),
        sample=torch.arange(len(sequences)).repeat_interleave(lengths),
        turn=torch.zeros(tokens, dtype=torch.int64),
        rewards=torch.zeros(len(sequences)),
        members=(),
    )


def _prompt(batch_part: BatchPart, sequence: int) -> int:
    """Tokens before its first turn."""
    starts = batch_part.turn_starts[sequence]
    return starts[0] if starts else batch_part.lengths[sequence]


def _cut(family: list[int], sequences: Sequence[Sequence[Entries]], max_tokens: int) -> list[tuple[int, list[int]]]:
    """Samples with the same prompt as parts of at most `max_tokens`: (tokens computed, samples) of each.

    sequences: of every sample. Those that begin alike stand side by side.
    """
    parts: list[tuple[int, list[int]]] = []
    before = sequences[family[0]][0][:0]
    for k in (family[place] for place in in_order([sequences[k][0] for k in family])):
        own = sequences[k]
        more = sum(len(each) - saved(last, each) for last, each in pairwise([before, *own]))
        if parts and parts[-1][0] + more <= max_tokens:
            parts[-1] = (parts[-1][0] + more, [*parts[-1][1], k])
        else:
            alone = sum(len(each) - saved(last, each) for last, each in pairwise([before[:0], *own]))
            parts.append((alone, [k]))
        before = own[-1]
    return parts


def assign(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of the samples of each pack.

    First-fit-decreasing says how many packs are needed; then each sample, longest first, goes to the emptiest of
    that many. Should this overflow one, the first-fit packs stand. Within a pack the longest samples come first, and
    those of equal length side by side (`attention` computes them together).
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    alone = [[i] for i in order if lengths[i] > max_tokens]
    order = order[len(alone) :]

    fitted: list[list[int]] = []
    loads: list[int] = []
    for i in order:
        where = next((k for k, load in enumerate(loads) if load + lengths[i] <= max_tokens), len(loads))
        if where == len(loads):
            fitted.append([])
            loads.append(0)
        fitted[where].append(i)
        loads[where] += lengths[i]

    balanced: list[list[int]] = [[] for _ in fitted]
    loads = [0] * len(fitted)
    for i in order:
        where = loads.index(min(loads))
        balanced[where].append(i)
        loads[where] += lengths[i]
    packs = balanced if all(load <= max_tokens for load in loads) else fitted
    return alone + packs


def pad_packs(packs: list[Pack], count: int) -> list[Pack]:
    """Dummies at the end up to `count` packs: every rank must run the same number of forwards under FSDP."""
    if len(packs) > count:
        raise ValueError(f"{len(packs)} packs cannot be padded to {count}")
    return packs + [dummy_pack()] * (count - len(packs))


def dummy_pack() -> Pack:
    """One token that is not generated: it runs through the model and contributes exactly zero."""
    place = torch.zeros(1, dtype=torch.int64)
    columns = _tensors(masked_columns(dict.fromkeys(get_args(Scope), 1)))
    columns |= {"staleness": place, "advantages": torch.zeros(1), "token_weights": torch.zeros(1)}
    return Pack(columns, position_ids=place, sample=place, turn=place, rewards=torch.zeros(1), members=())


def split_minibatches(batch_part: BatchPart, count: int) -> list[BatchPart]:
    """This rank's part of `count` minibatches of whole groups; the same groups on every rank, in order of rows.

    `rows` stay those of the whole batch (members and advantages index them); `members` and `loss_tokens`, the
    global normaliser, are the minibatch's. Raises ValueError when `count` does not divide the groups.
    """
    part_of = minibatch_of(batch_part, count)
    return [_restrict(batch_part, {row for row, place in enumerate(part_of) if place == part}) for part in range(count)]


def minibatch_of(batch_part: BatchPart, count: int) -> list[int]:
    """(N,) minibatch of each row. Raises ValueError when `count` does not divide the groups."""
    groups = list(dict.fromkeys(row.group_id for row in batch_part.rows))
    if len(groups) % count:
        raise ValueError(f"{len(groups)} groups cannot be split into {count} minibatches")
    part_of = {group: i * count // len(groups) for i, group in enumerate(groups)}
    return [part_of[row.group_id] for row in batch_part.rows]


def _restrict(batch_part: BatchPart, rows: set[int]) -> BatchPart:
    loss_tokens = sum(batch_part.rows[row].loss_tokens for row in rows)
    return msgspec.structs.replace(batch_part.of_rows(rows), loss_tokens=loss_tokens)


def _spread(batch_part: BatchPart) -> dict[str, np.ndarray]:
    """Every column with (sum T, ...) entries: that of a turn, sequence or sample stands at each of its tokens."""
    columns = dict(batch_part.columns)
    for name, values in batch_part.columns.items():
        scope = COLUMNS[name].scope
        if scope == "token":
            continue

        counts = batch_part.entries()[scope]
        entry = np.repeat(np.cumsum(counts) - counts, batch_part.lengths)  # (sum T,) the first one of each member
        if scope == "turn":
            entry += np.concatenate(
                [_turns(*one) for one in zip(batch_part.lengths, batch_part.turn_starts, strict=True)]
            )
        columns[name] = values[entry]
    return columns


def _pack(
    batch_part: BatchPart, columns: dict[str, np.ndarray], spans: list[slice], samples: list[list[int]], version: int
) -> Pack:
    """`samples` lists the sequences of each sample; `spans` says where the tokens of each stand in `columns`."""
    chosen = [i for own in samples for i in own]
    members = [batch_part.members[own[0]] for own in samples]
    lengths = torch.tensor([batch_part.lengths[i] for i in chosen])
    tokens = torch.tensor([sum(batch_part.lengths[i] for i in own) for own in samples])
    found = _tensors({name: np.concatenate([values[spans[i]] for i in chosen]) for name, values in columns.items()})

    mask = found["loss_mask"]
    found["staleness"] = (version - found["policy_version"]) * mask
    found["advantages"] = torch.zeros(len(mask))
    found["token_weights"] = torch.ones(len(mask))
    return Pack(
        columns=found,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        sample=torch.arange(len(samples)).repeat_interleave(tokens),
        turn=torch.from_numpy(np.concatenate([_sample_turns(batch_part, own) for own in samples])),
        rewards=torch.tensor([batch_part.rows[i].reward for i in members], dtype=torch.float32),
        members=tuple(members),
    )


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    """int32 becomes int64, the dtype of indices in torch; uint16 int32, with which torch computes; the mask bool."""
    wide = {name: array.astype(_WIDER.get(array.dtype, array.dtype), copy=False) for name, array in arrays.items()}
    return {name: torch.from_numpy(array) for name, array in (wide | {"loss_mask": wide["loss_mask"] != 0}).items()}


def _sample_turns(batch_part: BatchPart, sequences: list[int]) -> np.ndarray:
    """(T,) int64: `_turns` of a sample's sequences, counted by time."""
    if len(sequences) == 1:
        return _turns(batch_part.lengths[sequences[0]], batch_part.turn_starts[sequences[0]])

    return np.concatenate(
        [
            np.array(batch_part.turn_order[i])[_turns(batch_part.lengths[i], batch_part.turn_starts[i])]
            for i in sequences
        ]
    )


def _turns(length: int, starts: list[int]) -> np.ndarray:
    """(length,) int64: turns that have started at each token, less one; 0 before the first."""
    begun = np.zeros(length, np.int64)
    begun[[start for start in starts if start < length]] = 1
    turns: np.ndarray = np.maximum(begun.cumsum() - 1, 0)
    return turns

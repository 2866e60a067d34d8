"""Each prompt once: which tokens of a pack a forward computes where several samples answer the same prompt.

The samples of a group begin with the same prompt. A causal model's state at a prompt's token depends on nothing that
comes after it, so one copy serves all of them, and the gradients of all answers add up in it: the result is that of
separate samples, at the cost of the prompt once. FlashAttention has no such form; `attention` computes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

SHORTEST = 4
"""Tokens of a prompt that is worth it."""

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Answers:
    """`count` answers of `length` tokens, each to a prompt of `prompt` tokens."""

    prompt: int
    length: int
    count: int
    mask: Tensor  # (length, prompt + length) bool: what each of their tokens attends to


@dataclass(frozen=True)
class SharedPrompts:
    """C of a pack's T tokens, in the order of a forward: what stands for itself, then answers to shared prompts."""

    tokens: Tensor  # (C,) int64, places in the pack
    rows: Tensor  # (T,) int64, where the state of each of the pack's tokens stands among those C
    whole: list[tuple[int, int]]  # (tokens, how many so long): shared prompts, and samples that share nothing
    answers: list[Answers]
    prompts: Tensor  # (sum of count * prompt,) int64, rows of the prompts of all answers, one after another


def find_shared(token_ids: Tensor, position_ids: Tensor, targets: Tensor) -> SharedPrompts | None:
    """None where nothing is shared; token_ids and position_ids (T,) int64, targets (S,) int64: ascending places.

    A sample's prompt is what comes before its first target.
    """
    starts = np.flatnonzero(position_ids.cpu().numpy() == 0)
    if len(starts) < 2:
        return None

    ids = token_ids.cpu().numpy()
    ends = np.append(starts[1:], len(ids))
    wanted = np.append(targets.cpu().numpy(), len(ids))
    begins = np.minimum(wanted[np.searchsorted(wanted, starts)], ends)  # of the answers

    spans = [slice(start, begin) for start, begin in zip(starts, begins, strict=True)]
    families = [own for own in same_prompts([ids[span] for span in spans]) if len(own) > 1]
    families = [own for own in families if begins[own[0]] - starts[own[0]] >= SHORTEST]
    families = [[i for i in own if begins[i] < ends[i]] for own in families]
    families = [own for own in families if len(own) > 1]
    if not families:
        return None

    return _layout(starts, begins, ends, families, token_ids.device)


def same_prompts(prompts: Sequence[Ids]) -> list[list[int]]:
    """Indices of equal ones together, in the order of the first of each."""
    families: dict[bytes, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        families[prompt.tobytes()].append(i)
    return list(families.values())


def _layout(starts: Ids, begins: Ids, ends: Ids, families: list[list[int]], device: torch.device) -> SharedPrompts:
    first_of = {i: own[0] for own in families for i in own}
    whole = [(starts[i], ends[i]) for i in range(len(starts)) if i not in first_of]
    whole += [(starts[own[0]], begins[own[0]]) for own in families]
    whole.sort(key=lambda span: span[0] - span[1])

    def shape(i: int) -> tuple[int, int]:
        return int(begins[i] - starts[i]), int(ends[i] - begins[i])

    answers = sorted(first_of, key=shape, reverse=True)
    tokens = _joined([*whole, *((begins[i], ends[i]) for i in answers)])

    rows = np.zeros(ends[-1], np.int64)
    rows[tokens] = np.arange(len(tokens))
    for i, first in first_of.items():
        rows[starts[i] : begins[i]] = rows[starts[first] : begins[first]]

    def place(array: Ids) -> Tensor:
        return torch.from_numpy(array).to(device)

    return SharedPrompts(
        tokens=place(tokens),
        rows=place(rows),
        whole=[(int(length), len(list(equal))) for length, equal in groupby(end - start for start, end in whole)],
        answers=[_answers(*each, len(list(equal)), device) for each, equal in groupby(answers, key=shape)],
        prompts=place(rows[_joined((starts[i], begins[i]) for i in answers)]),
    )


def _answers(prompt: int, length: int, count: int, device: torch.device) -> Answers:
    mask = torch.ones(length, prompt + length, dtype=torch.bool, device=device).tril(prompt)
    return Answers(prompt, length, count, mask)


def _joined(spans: Iterable[tuple[np.int64, np.int64]]) -> Ids:
    return np.concatenate([np.arange(start, end) for start, end in spans])

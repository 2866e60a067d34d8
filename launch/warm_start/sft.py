"""Supervised training on (prompt, completion) pairs: packed, loss on the completions only, or on what was read as well.

Used for the warm start of tiny models; works for any decoder of transformers whose head is one linear layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl.models.packing import assign

_WEIGHT_DECAY = 0.01
_MAX_GRAD_NORM = 1.0
IGNORED = -100
SHOWN, IMITATED, READ = 0, 1, 2
"""Marks of `Example.mask`: only seen; to be written; text of the environment."""


@dataclass(frozen=True)
class Example:
    """One demonstration, as token ids; the completion ends with the end-of-turn token.

    Over several turns the completion holds the environment's text as well; `mask` says what each of its tokens is
    (None: all are imitated).
    """

    prompt: Sequence[int]
    completion: Sequence[int]
    mask: Sequence[int] | None = None

    def __len__(self) -> int:
        return len(self.prompt) + len(self.completion)

    def targets(self, kind: int) -> list[int]:
        """The next token at every token, where its mark is `kind`, else IGNORED."""
        marks = [IMITATED] * len(self.completion) if self.mask is None else self.mask
        counted = [token if mark == kind else IGNORED for token, mark in zip(self.completion, marks, strict=True)]
        return [IGNORED] * (len(self.prompt) - 1) + counted + [IGNORED]


@dataclass(frozen=True)
class Rows:
    """Packed examples. Positions restart at each example, which keeps them apart in attention."""

    token_ids: Tensor  # (rows, width) int64
    position_ids: Tensor  # (rows, width) int64
    targets: Tensor  # (rows, width) int64, the next token where it is to be imitated, else IGNORED
    read: Tensor  # (rows, width) int64, the next token where it is text of the environment, else IGNORED


@dataclass(frozen=True)
class SupervisedOptions:
    steps: int
    lr: float
    """Highest learning rate: linear warm-up, then half a cosine down to a tenth."""
    warmup_steps: int
    width: int | None = 256
    """Tokens of a row, whose square is what attention costs; None: one row, for a model that attends in packs."""
    read_weight: float = 0.0
    """Weight of the mean loss on the environment's text, beside that on what is imitated. Its answers repeat names from
    the commands: a small model learns to copy from them."""
    parts: int = 1
    """Parts of a batch whose gradients are computed side by side, a thread each, and added in order. So the result
    depends on the number of parts, not on that of cores."""


def pack_rows(examples: Sequence[Example], width: int | None, device: torch.device | str = "cpu") -> Rows:
    """First-fit decreasing into rows of `width` tokens; a longer example widens all rows to its length.

    width None: all in one row without padding.
    """
    lengths = [len(example) for example in examples]
    width = sum(lengths) if width is None else max(width, *lengths)
    rows = [[examples[index] for index in chosen] for chosen in assign(lengths, width)]

    # Padding is one more example without a completion: no target looks at it, and no other example sees it.
    for row in rows:
        if free := width - sum(map(len, row)):
            row.append(Example([0] * free, []))

    def tensor(values: Callable[[Example], Iterable[int]]) -> Tensor:
        return torch.tensor([[value for example in row for value in values(example)] for row in rows], device=device)

    return Rows(
        token_ids=tensor(lambda example: [*example.prompt, *example.completion]),
        position_ids=tensor(lambda example: range(len(example))),
        targets=tensor(lambda example: example.targets(IMITATED)),
        read=tensor(lambda example: example.targets(READ)),
    )


def supervised_loss(model: Any, rows: Rows, read_weight: float = 0.0, batch: Sequence[Rows] | None = None) -> Tensor:
    """Mean negative log-likelihood of the imitated tokens, in nats, and `read_weight` times that of the text read.

    Logits are computed for those tokens only. The means are over the tokens of `batch` (default: `rows` alone): the
    losses of a batch's parts add up to the batch's.
    """
    from rl.models import stock  # with transformers, which takes seconds to import

    hidden = stock.states(model, rows.token_ids, rows.position_ids)  # (rows, width, hidden)

    def mean(kind: str) -> Tensor:
        targets = getattr(rows, kind)
        counted = targets != IGNORED
        count = sum(int((getattr(part, kind) != IGNORED).sum()) for part in batch or [rows])
        logits = stock.logits(model, hidden[counted])  # (targets, vocabulary)
        return F.cross_entropy(logits.float(), targets[counted], reduction="sum") / max(1, count)

    loss: Tensor = mean("targets")
    return loss + read_weight * mean("read") if read_weight else loss


def split_examples(examples: Sequence[Example], parts: int) -> list[list[Example]]:
    """The examples in at most `parts` lists of about equally many tokens: longest first, each to the list with the
    fewest."""
    lists: list[list[Example]] = [[] for _ in range(min(parts, len(examples)))]
    for example in sorted(examples, key=len, reverse=True):
        min(lists, key=lambda each: sum(map(len, each))).append(example)
    return lists


def train_supervised(
    model: nn.Module,
    next_examples: Callable[[int], Sequence[Example]],
    options: SupervisedOptions,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train on `next_examples(step)` for `options.steps` steps of AdamW; `report(step, loss)` follows each.

    Each part runs on one thread, so the weights are the same whatever the number of cores.
    """
    device = next(model.parameters()).device
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=options.lr, weight_decay=_WEIGHT_DECAY)

    def gradients(rows: Rows, batch: Sequence[Rows]) -> tuple[Tensor, ...]:
        loss = supervised_loss(model, rows, options.read_weight, batch)
        return loss.detach(), *torch.autograd.grad(loss, parameters, materialize_grads=True)

    model.train()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(options.parts, "gradients") as pool:
            for step in range(options.steps):
                parts = split_examples(next_examples(step), options.parts)
                batch = [pack_rows(part, options.width, device) for part in parts]
                found = pool.map(gradients, batch, [batch] * len(batch))
                loss, *sums = (reduce(torch.add, each) for each in zip(*found, strict=True))

                for parameter, gradient in zip(parameters, sums, strict=True):
                    parameter.grad = gradient
                for group in optimizer.param_groups:
                    group["lr"] = options.lr * _schedule(step, options)
                nn.utils.clip_grad_norm_(parameters, _MAX_GRAD_NORM)
                optimizer.step()
                report(step, loss.item())
    finally:
        torch.set_num_threads(threads)
    model.eval()


def _schedule(step: int, options: SupervisedOptions) -> float:
    """Share of the highest learning rate: linear warm-up, then half a cosine down to a tenth."""
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    done = (step - options.warmup_steps) / max(1, options.steps - options.warmup_steps)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done))


def progress_report(log: Callable[[str], None], steps: int, every: int) -> Callable[[int, float], None]:
    """A `report` for `train_supervised` that logs the first step and each `every`-th, with the seconds so far."""
    started = time.monotonic()

    def report(step: int, loss: float) -> None:
        if step == 0 or (step + 1) % every == 0:
            log(f"  step {step + 1}/{steps}  loss {loss:.3f}  {time.monotonic() - started:.0f} s")

    return report

"""CPU seconds that bare learners need for the samples of some steps: `python -m experiments.bench._bare_learner WORK`.

`stock`: a step's samples sorted by length, at most `rows_at_once` in a batch, padded to its longest, with torch's own
causal attention. Nothing is computed of padding but what a batch cannot leave out. A batch has the size that costs
least on the first steps. `shared`: the packs that Fresco's learner makes, each prompt once. Tokens and advantages are
random: what they say costs nothing.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import get_args

import numpy as np
import torch

from experiments.bench._bare_loop import BareLoop, Form
from experiments.bench._bound import Work
from experiments.bench._measuring import batch_part_of
from rl.models.packing import Pack, make_packs
from rl.wire.messages import BatchPart
from rl.wire.process import die_with_parent
from rl.wire.run import RunFile

_TRIED = 3  # steps for each size of a batch


def measure(work: Work, form: Form) -> float:
    """CPU seconds of all threads, after one step that warms up; of a stock learner in the cheapest of all batches."""
    run = RunFile.load(work.run)
    torch.set_num_threads(1)
    loop = BareLoop(run, form)
    random = np.random.default_rng(0)
    vocabulary = loop.model.config.vocab_size
    batch_parts = [
        batch_part_of(step.prompt, step.answers, work.group_size, vocabulary, random, shared=True)
        for step in work.steps
    ]

    if form != "stock":
        budget = run.config.learner.pack_tokens(run.device)
        return _cpu_s(loop, batch_parts, lambda batch_part: make_packs(batch_part, budget, batch_part.step))

    def padded_by(rows: int) -> Callable[[BatchPart], list[Pack]]:
        return lambda batch_part: padded(batch_part, rows)

    tried = {rows: _cpu_s(loop, batch_parts[:_TRIED], padded_by(rows)) for rows in batch_sizes(work.rows_at_once)}
    return _cpu_s(loop, batch_parts, padded_by(min(tried, key=tried.__getitem__)))


def batch_sizes(most: int) -> list[int]:
    """Samples in one batch that a stock learner tries: fewer have less padding, more have fewer calls."""
    return [most // fewer for fewer in (1, 2, 4, 8) if most >= fewer]


def _cpu_s(loop: BareLoop, batch_parts: Sequence[BatchPart], packed: Callable[[BatchPart], list[Pack]]) -> float:
    """The CPU seconds of one step on each batch part, without one on the first, which warms up."""
    made = ((batch_part, [_with_advantages(pack) for pack in packed(batch_part)]) for batch_part in batch_parts)
    batches = [(loop.prepared(packs), batch_part.loss_tokens) for batch_part, packs in made]

    loop.step(*batches[0])
    begin = time.process_time()
    for packs, tokens in batches:
        loop.step(packs, tokens)
    return time.process_time() - begin


def padded(batch_part: BatchPart, rows_at_once: int) -> list[Pack]:
    """Batches of samples of similar length, each sample with padding behind it up to its batch's longest."""
    ends = np.cumsum(batch_part.lengths)
    order = sorted(range(len(ends)), key=batch_part.lengths.__getitem__)
    chunks = [order[first : first + rows_at_once] for first in range(0, len(order), rows_at_once)]
    return [_batch(batch_part, chunk, ends) for chunk in chunks]


def _batch(batch_part: BatchPart, chosen: Sequence[int], ends: np.ndarray) -> Pack:
    longest = max(batch_part.lengths[i] for i in chosen)
    columns = {}
    for name in ("token_ids", "loss_mask", "logp_behavior"):
        column = batch_part.columns[name]
        rows = np.zeros((len(chosen), longest), column.dtype)
        for row, i in enumerate(chosen):
            rows[row, : batch_part.lengths[i]] = column[ends[i] - batch_part.lengths[i] : ends[i]]
        columns[name] = torch.from_numpy(rows.reshape(-1))

    columns["token_ids"] = columns["token_ids"].long()
    columns["loss_mask"] = columns["loss_mask"].bool()
    sample = torch.arange(len(chosen)).repeat_interleave(longest)
    positions = torch.arange(longest).repeat(len(chosen))
    return Pack(columns, positions, sample, torch.zeros_like(sample), torch.zeros(len(chosen)), tuple(chosen))


def _with_advantages(pack: Pack) -> Pack:
    return pack.with_columns(advantages=torch.randn(pack.tokens))


def main(argv: list[str]) -> None:
    die_with_parent()
    work = Work.load(argv[0])
    print(json.dumps({form: measure(work, form) for form in get_args(Form) if form != "packed"}))


if __name__ == "__main__":
    main(sys.argv[1:])

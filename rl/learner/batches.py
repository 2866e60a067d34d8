"""What must hold for every batch part of a batch before anything is trained on it.

The broker enforces freshness (F4); the learner asserts it again, from the rows of the whole batch and from
the versions of its own tokens. A violation ends the run: it is a bug, never a condition to train through.
"""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np

from rl.observe.alarms import RunAlarm
from rl.wire.columns import mismatch
from rl.wire.messages import BatchPart


def check_batch_part(batch_part: BatchPart, *, step: int, rank: int, timeline: int, staleness_bound: int) -> None:
    """Raises RunAlarm for old samples and a batch part that contradicts itself, ValueError for another one."""
    if (batch_part.timeline, batch_part.step, batch_part.rank) != (timeline, step, rank):
        raise ValueError(
            f"learner.{rank} expected its batch part of step {step} in timeline {timeline}, received the one of "
            f"rank {batch_part.rank}, step {batch_part.step}, timeline {batch_part.timeline}"
        )

    if wrong := contradiction(batch_part):
        raise RunAlarm("batch-contradicts", f"step {step}: {wrong}")

    _check_freshness(batch_part, step, staleness_bound)


def contradiction(batch_part: BatchPart) -> str:
    """What disagrees within a batch part, in one line, or the empty string."""
    counts = [len(batch_part.members), len(batch_part.lengths), len(batch_part.turn_starts)]
    if len(set(counts)) > 1:
        return f"{counts} members, lengths and turns"
    if wrong := mismatch(batch_part.columns, {scope: sum(counts) for scope, counts in batch_part.entries().items()}):
        return wrong

    samples = [row.sample_id for row in batch_part.rows]
    if samples != sorted(set(samples)):
        return "rows are not ordered by sample id, or hold a sample twice"
    return _of_turns(batch_part) or _of_tokens(batch_part) or _of_rows(batch_part)


def _of_turns(batch_part: BatchPart) -> str:
    """The turns of a sample have each a place in time, over all its sequences."""
    order = batch_part.turn_order or [list(range(len(starts))) for starts in batch_part.turn_starts]
    if list(map(len, order)) != list(map(len, batch_part.turn_starts)):
        return "some turns have no place in time"

    of_sample: dict[int, list[int]] = {}
    for member, places in zip(batch_part.members, order, strict=True):
        of_sample.setdefault(member, []).extend(places)
    for member, places in of_sample.items():
        if sorted(places) != list(range(len(places))):
            return f"the turns of sample {batch_part.rows[member].sample_id} have the places {places} in time"
    return ""


def _of_tokens(batch_part: BatchPart) -> str:
    """Trained tokens are exactly the sampled ones, and as many as the rows say."""
    mask = batch_part.loss_mask != 0
    wrong = np.count_nonzero(mask != (batch_part.policy_version >= 0))
    if wrong:
        return f"{wrong} tokens are trained and were not sampled, or the other way round"

    ends = np.cumsum(batch_part.lengths)
    counted = np.diff(np.concatenate([[0], np.cumsum(mask)])[np.concatenate([[0], ends]).astype(int)])
    members = [member for member, _ in groupby(batch_part.members)]
    if len(members) > len(set(members)):
        return "the sequences of a sample stand apart"

    of_sample = np.zeros((len(batch_part.rows), 2), np.int64)
    np.add.at(of_sample, batch_part.members, np.stack([np.array(batch_part.lengths, np.int64), counted], 1))
    for member in members:
        length, tokens = of_sample[member].tolist()
        row = batch_part.rows[member]
        if (row.tokens, row.loss_tokens) != (length, tokens):
            return f"sample {row.sample_id} has {tokens} of {length} tokens, its row {row.loss_tokens} of {row.tokens}"
    return ""


def _of_rows(batch_part: BatchPart) -> str:
    """Rewards of turns add up, and the broker's means are those of the rows."""
    for row in batch_part.rows:
        if row.turn_rewards and not math.isclose(math.fsum(row.turn_rewards), row.reward, rel_tol=1e-6, abs_tol=1e-6):
            return f"the turns of sample {row.sample_id} earned {math.fsum(row.turn_rewards):g}, its row {row.reward:g}"
    total = sum(row.loss_tokens for row in batch_part.rows)
    if total != batch_part.loss_tokens:
        return f"{total} loss tokens in its rows, {batch_part.loss_tokens} as a whole"

    rewards = [row.reward for row in batch_part.rows if not row.unrewarded]
    means = {"reward": math.fsum(rewards) / max(1, len(rewards)), "length": total / len(batch_part.rows)}
    for name, mean in means.items():
        told = batch_part.metrics.get(f"rollout/{name}", mean)
        if not math.isclose(told, mean, rel_tol=1e-6, abs_tol=1e-6):
            return f"its rows have a mean {name} of {mean:g}, the broker says {told:g}"
    return ""


def _check_freshness(batch_part: BatchPart, step: int, staleness_bound: int) -> None:
    """Check the batch by what the rows of the whole batch say, and by each token of this rank's own samples."""
    oldest = step - staleness_bound
    versions = [row.version for row in batch_part.rows]
    old_tokens = (batch_part.loss_mask != 0) & (batch_part.policy_version < oldest)
    if old_tokens.any():
        members = np.repeat(batch_part.members, batch_part.lengths)[old_tokens]
        for member, version in zip(members.tolist(), batch_part.policy_version[old_tokens].tolist(), strict=True):
            versions[member] = min(versions[member], version)

    stale = [version for version in versions if version < oldest]
    if stale:
        raise RunAlarm(
            "stale-batch",
            f"the batch of step {step} holds {len(stale)} of {len(batch_part.rows)} samples that are too old "
            f"(versions {sorted(set(stale))}): staleness may be at most {staleness_bound}",
        )

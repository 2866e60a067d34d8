"""What must hold for every shard of a batch before anything is trained on it.

The broker enforces freshness (F4); the learner asserts it again, from the rows of the whole batch and from
the versions of its own tokens. A violation ends the run: it is a bug, never a condition to train through.
"""

from __future__ import annotations

from rl.core.columns import mismatch
from rl.core.messages import Shard


class StaleBatch(AssertionError):
    """A batch with samples older than the bound S = ceil(alpha): the broker has a bug, training must not go on."""


def check_shard(shard: Shard, *, step: int, rank: int, epoch: int, staleness_bound: int) -> None:
    """Raises StaleBatch for old samples, ValueError for a shard that is another one or contradicts itself."""
    if (shard.epoch, shard.step, shard.rank) != (epoch, step, rank):
        raise ValueError(
            f"learner.{rank} expected its shard of step {step} in epoch {epoch}, received the one of "
            f"rank {shard.rank}, step {shard.step}, epoch {shard.epoch}"
        )

    counts = [len(shard.members), len(shard.lengths), len(shard.turn_starts)]
    if len(set(counts)) > 1:
        raise ValueError(f"the shard of step {step} contradicts itself: {counts} members, lengths and turns")
    if wrong := mismatch(shard.columns, {scope: sum(counts) for scope, counts in shard.entries().items()}):
        raise ValueError(f"the shard of step {step} contradicts itself: {wrong}")

    oldest = step - staleness_bound
    stale = [row for row in shard.rows if row.version < oldest]
    generated = shard.policy_version[shard.loss_mask != 0]
    if stale or (generated.size and int(generated.min()) < oldest):
        versions = sorted({row.version for row in stale}) or [int(generated.min())]
        raise StaleBatch(
            f"the batch of step {step} holds {len(stale)} of {len(shard.rows)} samples that are too old "
            f"(versions {versions}): staleness may be at most {staleness_bound}"
        )

    samples = [row.sample_id for row in shard.rows]
    if samples != sorted(set(samples)):
        raise ValueError(f"the batch of step {step} is not ordered by sample id, or has a sample twice")

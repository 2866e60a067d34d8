"""From trajectories to the learner's shards, and what must be true of a trajectory before it counts."""

from __future__ import annotations

import heapq
import math
from zlib import crc32

import numpy as np

from rl.core.messages import SampleRow, Shard, Trajectory
from rollout.broker.actions import BatchSample, EmitBatch, Outcome

_DTYPES = {
    "token_ids": np.dtype(np.int32),
    "loss_mask": np.dtype(np.uint8),
    "logp_behavior": np.dtype(np.float32),
    "policy_version": np.dtype(np.int32),
}


def fault(trajectory: Trajectory) -> str:
    """What is wrong with a trajectory, or the empty string.

    All four arrays are (T,); turns are ascending spans within [0, T); each generated token has a finite
    log-probability and a version; no more tokens stand in the loss mask than were generated.
    """
    shape = trajectory.token_ids.shape
    for name, dtype in _DTYPES.items():
        array = getattr(trajectory, name)
        if len(shape) != 1 or array.shape != shape or array.dtype != dtype:
            return f"{name} is {array.dtype}{array.shape}, token_ids has shape {shape}"
    mask, versions = trajectory.loss_mask, trajectory.policy_version
    if np.count_nonzero(mask > (versions >= 0).view(np.uint8)):  # one pass for both faults
        if mask.max() > 1:
            return "loss_mask holds values other than 0 and 1"
        return "generated tokens without a policy version"
    length = np.count_nonzero(mask)
    if trajectory.tokens_generated < length:
        return f"{length} tokens in the loss mask, {trajectory.tokens_generated} generated"
    if np.count_nonzero(np.isfinite(trajectory.logp_behavior)) < shape[0]:
        return "logp_behavior is not finite"
    end = 0
    for turn in trajectory.turns:
        if not end <= turn.start <= turn.end <= shape[0]:
            return f"turn [{turn.start}, {turn.end}) after {end} of {shape[0]} tokens"
        end = turn.end
    if not math.isfinite(trajectory.reward):
        return f"reward {trajectory.reward}"
    return ""


def outcome_of(trajectory: Trajectory) -> Outcome:
    """What the core needs to know of a trajectory without fault.

    Success is the environment's `info["success"]`, else a positive reward.
    """
    return Outcome(
        epoch=trajectory.epoch,
        first_version=trajectory.first_version,
        reward=trajectory.reward,
        tokens_generated=trajectory.tokens_generated,
        length=int(np.count_nonzero(trajectory.loss_mask)),
        turns=len(trajectory.turns),
        success=float(trajectory.info.get("success", trajectory.reward > 0)),
        seconds=trajectory.seconds,
        payload=trajectory,
    )


def balance(tokens: list[int], ranks: int) -> list[list[int]]:
    """Indices for each rank, longest first to the rank with the fewest tokens (ties: the lower rank, the lower index).

    With as many samples as ranks or more, every rank gets at least one: an empty rank takes the next sample.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0, 0, rank) for rank in range(ranks)]  # (samples > 0, tokens, rank): empty ranks come first
    for index in sorted(range(len(tokens)), key=lambda i: (-tokens[i], i)):
        _, load, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (1, load + tokens[index], rank))
    return [sorted(share) for share in shares]


def make_shards(batch: EmitBatch, epoch: int, ranks: int) -> list[Shard]:
    """One shard per rank, rows of the whole batch in each, ordered by sample id."""
    samples = sorted(batch.samples, key=lambda sample: sample.sample_id)
    trajectories: list[Trajectory] = [sample.outcome.payload for sample in samples]
    rows = [_row(sample) for sample in samples]
    metrics = batch.metrics | _means(trajectories)
    loss_tokens = sum(row.loss_tokens for row in rows)
    shards = []
    for rank, members in enumerate(balance([row.tokens for row in rows], ranks)):
        chosen = [trajectories[member] for member in members]
        shards.append(
            Shard(
                step=batch.step,
                rank=rank,
                epoch=epoch,
                rows=rows,
                members=members,
                lengths=[rows[member].tokens for member in members],
                turn_starts=[[turn.start for turn in trajectory.turns] for trajectory in chosen],
                token_ids=_join([t.token_ids for t in chosen], np.int32),
                loss_mask=_join([t.loss_mask for t in chosen], np.uint8),
                logp_behavior=_join([t.logp_behavior for t in chosen], np.float32),
                policy_version=_join([t.policy_version for t in chosen], np.int32),
                loss_tokens=loss_tokens,
                metrics=metrics,
            )
        )
    return shards


def _turn_states(trajectory: Trajectory) -> list[int]:
    """CRC-32 of the tokens between the end of the turn before (or the start) and each turn."""
    states, end = [], 0
    for turn in trajectory.turns:
        states.append(crc32(trajectory.token_ids[end : turn.start].data))
        end = turn.end
    return states


def _row(sample: BatchSample) -> SampleRow:
    trajectory: Trajectory = sample.outcome.payload
    return SampleRow(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        reward=trajectory.reward,
        tokens=len(trajectory.token_ids),
        loss_tokens=sample.outcome.length,
        version=sample.version,
        truncated=trajectory.stop_reason != "done",
        turn_rewards=[turn.reward for turn in trajectory.turns],
        turn_states=_turn_states(trajectory),
    )


def _join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0, dtype)


def _means(trajectories: list[Trajectory]) -> dict[str, float]:
    """Means of what the environments counted, over the samples that have it."""
    sums: dict[str, list[float]] = {}  # of the environments' own numbers, where a sample has them
    for trajectory in trajectories:
        for name, value in trajectory.info.items():
            sums.setdefault(f"env/{name}", []).append(value)
    count = len(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    return {name: sum(values) / len(values) for name, values in sums.items()} | {
        "rollout/truncated": sum([t.stop_reason != "done" for t in trajectories]) / count,
        "rollout/generate_s": sum([turn.generate_s for turn in turns]) / count,
        "rollout/env_s": sum([turn.env_s for turn in turns]) / count,
    }

"""From trajectories to the learner's shards, and what must be true of a trajectory before it counts."""

from __future__ import annotations

import heapq
import math
from zlib import crc32

import numpy as np

from rl.core.columns import carried, mismatch
from rl.core.messages import SampleRow, Shard, TokenSequence, Trajectory
from rollout.broker.actions import BatchSample, EmitBatch, Outcome


def fault(trajectory: Trajectory) -> str:
    """What is wrong with a trajectory, or the empty string.

    Columns are those of the table, in its dtypes and shapes, and finite; turns are ascending spans within [0, T);
    each generated token has a version; no more tokens stand in the loss mask than were generated.
    """
    if len(trajectory.sequences) != 1:
        return f"{len(trajectory.sequences)} sequences: a trajectory has one"
    sequence = trajectory.sequence
    columns = sequence.columns | trajectory.columns
    tokens = columns["token_ids"].size if "token_ids" in columns else 0
    if wrong := mismatch(columns, {"token": tokens, "turn": len(sequence.turns), "sequence": 1, "sample": 1}):
        return wrong

    mask = sequence.loss_mask
    if np.count_nonzero(mask > (sequence.policy_version >= 0).view(np.uint8)):  # one pass for both faults
        if mask.max() > 1:
            return "loss_mask holds values other than 0 and 1"
        return "generated tokens without a policy version"
    length = np.count_nonzero(mask)
    if trajectory.tokens_generated < length:
        return f"{length} tokens in the loss mask, {trajectory.tokens_generated} generated"

    for name, array in columns.items():
        if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) < array.size:
            return f"{name} is not finite"
    end = 0
    for turn in sequence.turns:
        if not end <= turn.start <= turn.end <= tokens:
            return f"turn [{turn.start}, {turn.end}) after {end} of {tokens} tokens"
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
        first_version=trajectory.sequence.first_version,
        reward=trajectory.reward,
        tokens_generated=trajectory.tokens_generated,
        length=int(np.count_nonzero(trajectory.sequence.loss_mask)),
        turns=len(trajectory.sequence.turns),
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
                turn_starts=[[turn.start for turn in trajectory.sequence.turns] for trajectory in chosen],
                columns=_joined(chosen),
                loss_tokens=loss_tokens,
                metrics=metrics,
            )
        )
    return shards


def _joined(trajectories: list[Trajectory]) -> dict[str, np.ndarray]:
    """Every carried column, one trajectory after another."""
    parts = [trajectory.sequence.columns | trajectory.columns for trajectory in trajectories]
    return {
        column.name: np.concatenate([part[column.name] for part in parts] or [column.full(0)]) for column in carried()
    }


def _turn_states(sequence: TokenSequence) -> list[int]:
    """CRC-32 of the tokens between the end of the turn before (or the start) and each turn."""
    states = []
    end = 0
    for turn in sequence.turns:
        states.append(crc32(sequence.token_ids[end : turn.start].data))
        end = turn.end
    return states


def _row(sample: BatchSample) -> SampleRow:
    trajectory: Trajectory = sample.outcome.payload
    sequence = trajectory.sequence

    return SampleRow(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        reward=trajectory.reward,
        tokens=len(sequence.token_ids),
        loss_tokens=sample.outcome.length,
        version=sample.version,
        truncated=trajectory.stop_reason != "done",
        turn_rewards=[turn.reward for turn in sequence.turns],
        turn_states=_turn_states(sequence),
    )


def _means(trajectories: list[Trajectory]) -> dict[str, float]:
    """Means of what the environments counted, over the samples that have it."""
    sums: dict[str, list[float]] = {}  # of the environments' own numbers, where a sample has them
    for trajectory in trajectories:
        for name, value in trajectory.info.items():
            sums.setdefault(f"env/{name}", []).append(value)
    count = len(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.sequence.turns]
    return {name: sum(values) / len(values) for name, values in sums.items()} | {
        "rollout/truncated": sum([t.stop_reason != "done" for t in trajectories]) / count,
        "rollout/generate_s": sum([turn.generate_s for turn in turns]) / count,
        "rollout/env_s": sum([turn.env_s for turn in turns]) / count,
    }

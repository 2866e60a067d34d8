"""Turns trajectories into the learner's batch parts."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any
from zlib import crc32

import msgspec
import numpy as np

from rl.wire.columns import carried
from rl.wire.messages import BatchPart, SampleRow, TokenSequence, Trajectory
from rollout.broker.actions import BatchSample, EmitBatch, EpisodeOutcome
from rollout.broker.validation import LONGEST_REASON


def outcome_of(trajectory: Trajectory) -> EpisodeOutcome:
    """What the core needs to know of a trajectory that `validation.fault` has let pass."""
    return EpisodeOutcome(
        timeline=trajectory.timeline,
        version=min(sequence.oldest_version for sequence in trajectory.sequences),
        reward=trajectory.reward,
        tokens_generated=trajectory.tokens_generated,
        length=sum(int(np.count_nonzero(sequence.loss_mask)) for sequence in trajectory.sequences),
        turns=len(trajectory.turns),
        success=float(trajectory.success),
        seconds=trajectory.seconds,
        payload=trajectory,
        newest_version=max(int(sequence.policy_version.max(initial=-1)) for sequence in trajectory.sequences),
        label=trajectory.label,
        info=trajectory.info,
        unrewarded=trajectory.unrewarded[:LONGEST_REASON],
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


def make_batch_parts(batch: EmitBatch, timeline: int, ranks: int, together: int = 1) -> list[BatchPart]:
    """One batch part per rank, rows of the whole batch in each, ordered by sample id.

    together: neighbours that get the same samples, because they compute them together.
    """
    samples = sorted(batch.samples, key=lambda sample: sample.sample_id)
    trajectories: list[Trajectory] = [sample.outcome.payload for sample in samples]
    rows = [_row(sample) for sample in samples]
    metrics = batch.metrics | _means(trajectories)
    loss_tokens = sum(row.loss_tokens for row in rows)

    batch_parts = []
    for rank, members in enumerate(balance([row.tokens for row in rows], ranks // together)):
        sequences = [(member, each) for member in members for each in trajectories[member].sequences]
        batch_parts.append(
            BatchPart(
                step=batch.step,
                rank=rank,
                timeline=timeline,
                rows=rows,
                members=[member for member, _ in sequences],
                lengths=[len(sequence.token_ids) for _, sequence in sequences],
                turn_starts=[[turn.start for turn in sequence.turns] for _, sequence in sequences],
                turn_order=[order for member in members for order in _turn_order(trajectories[member])],
                columns=_joined([sequence.columns | trajectories[member].columns for member, sequence in sequences]),
                loss_tokens=loss_tokens,
                metrics=metrics,
                over=batch.over,
            )
        )
    return [msgspec.structs.replace(batch_parts[rank // together], rank=rank) for rank in range(ranks)]


def no_batch(step: int, last_step: int, timeline: int, rank: int) -> BatchPart:
    """What takes the place of batch `step`: there is none, and none after it. From `last_step` on the run is over."""
    nothing: Any = {"rows": [], "members": [], "lengths": [], "turn_starts": [], "loss_tokens": 0}
    return BatchPart(
        step=step, rank=rank, timeline=timeline, columns=_joined([]), over=float(step >= last_step), **nothing
    )


def _joined(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Every carried column, one sequence after another."""
    return {
        column.name: np.concatenate([part[column.name] for part in parts] or [column.full(0)]) for column in carried()
    }


def _in_time(trajectory: Trajectory) -> list[int]:
    """The turns in the order of time, by their places in `Trajectory.turns`, where they stand sequence by sequence."""
    turns = trajectory.turns
    return sorted(range(len(turns)), key=lambda i: turns[i].number)


def _turn_order(trajectory: Trajectory) -> list[list[int]]:
    """For each sequence, the places of its turns in time."""
    place = {i: k for k, i in enumerate(_in_time(trajectory))}
    listed = iter(range(len(place)))
    return [[place[next(listed)] for _ in sequence.turns] for sequence in trajectory.sequences]


def _turn_states(sequence: TokenSequence) -> list[int]:
    """CRC-32 of the tokens between the end of the turn before (or the start) and each turn.

    What a fork shares with an earlier sequence says nothing of the turn that it begins with.
    """
    states = []
    end = sequence.shared
    for turn in sequence.turns:
        states.append(crc32(sequence.token_ids[end : turn.start].data))
        end = turn.end
    return states


def _row(sample: BatchSample) -> SampleRow:
    trajectory: Trajectory = sample.outcome.payload
    turns = trajectory.turns
    states = [state for sequence in trajectory.sequences for state in _turn_states(sequence)]
    in_time = _in_time(trajectory)

    return SampleRow(
        sample_id=sample.sample_id,
        group_id=sample.group_id,
        reward=trajectory.reward,
        tokens=sum(len(sequence.token_ids) for sequence in trajectory.sequences),
        loss_tokens=sample.outcome.length,
        version=sample.outcome.version,
        truncated=trajectory.stop_reason != "done",
        turn_rewards=[turns[i].reward for i in in_time],
        turn_states=[states[i] for i in in_time],
        ticket_id=trajectory.ticket_id,
        unrewarded=bool(trajectory.unrewarded),
    )


def _solved(trajectories: list[Trajectory]) -> dict[str, float]:
    """Shares of the groups whose members all succeeded, or none: they teach a group-relative advantage little."""
    groups: dict[int, list[bool]] = {}
    for trajectory in trajectories:
        if not trajectory.unrewarded:
            groups.setdefault(trajectory.group_id, []).append(trajectory.success)
    return {
        "groups/solved": sum(all(members) for members in groups.values()) / max(1, len(groups)),
        "groups/unsolved": sum(not any(members) for members in groups.values()) / max(1, len(groups)),
    }


def info_means(infos: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """`env/...`: means of the environments' own numbers, each over the samples that have it; `audit/...` as it is."""
    sums: dict[str, list[float]] = {}
    for info in infos:
        for name, value in info.items():
            sums.setdefault(name if name.startswith("audit/") else f"env/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def _means(trajectories: list[Trajectory]) -> dict[str, float]:
    """Means of what the environments counted, and of what turns took."""
    count = len(trajectories)
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    means = info_means(trajectory.info for trajectory in trajectories) | {
        "rollout/truncated": sum([t.stop_reason != "done" for t in trajectories]) / count,
        "rollout/generate_s": sum([turn.generate_s for turn in turns]) / count,
        "rollout/env_s": sum([turn.env_s for turn in turns]) / count,
    }
    return means | _solved(trajectories)

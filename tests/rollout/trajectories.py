"""Trajectories and generators' replies as tests need them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from experiments.columns import token_columns
from rl.wire.messages import Ticket, TokenSequence, Trajectory, Turn
from rollout.episodes.environment import ChatMessage
from rollout.episodes.forest import Forest, ForestTurn


def make_trajectory(
    ticket: Ticket, seq: int, reward: float, tokens: int = 4, incarnation: int = 0, versions: Sequence[int] = ()
) -> Trajectory:
    """Two tokens of prompt, then one turn: `tokens` tokens by the ticket's version, or one by each of `versions`."""
    versions = versions or [ticket.version.n] * tokens
    tokens = len(versions)
    length = tokens + 2
    columns = token_columns(
        np.full(length, ticket.sample_id + 10),
        [0, 0] + [1] * tokens,
        logp_behavior=-1.0,
        policy_version=[-1, -1, *versions],
    )

    return Trajectory(
        server=0,
        incarnation=incarnation,
        seq=seq,
        ticket_id=ticket.ticket_id,
        sample_id=ticket.sample_id,
        group_id=ticket.group_id,
        task_index=ticket.task_index,
        kind=ticket.kind,
        timeline=ticket.version.timeline,
        sequences=[TokenSequence(columns=columns, turns=[Turn(2, length, reward, 0.1, 0.0, "stop", 0)])],
        reward=reward,
        success=reward > 0,
        stop_reason="done",
        tokens_generated=tokens,
        seconds=0.1,
        info={"legal": 1.0},
    )


def with_sequence(trajectory: Trajectory, turns: list[Turn] | None = None, **columns: np.ndarray) -> Trajectory:
    """The same, with other turns or columns in its sequence."""
    sequence = trajectory.sequence
    changed = replace(sequence, turns=sequence.turns if turns is None else turns, columns=sequence.columns | columns)
    return replace(trajectory, sequences=[changed])


def turns_apart(sequence: TokenSequence) -> list[TokenSequence]:
    """Each turn in a sequence of its own, which repeats what came before, masked."""
    found = []
    end = 0
    for turn in sequence.turns:
        columns = {name: values[: turn.end].copy() for name, values in sequence.columns.items()}
        for name, masked in (("loss_mask", 0), ("policy_version", -1), ("logp_behavior", 0)):
            columns[name][:end] = masked
        found.append(TokenSequence(columns=columns, turns=[turn], shared=end))
        end = turn.end
    return found


def reply_columns(token_ids: Sequence[int], logp: Any = -0.5, version: Any = 0) -> dict[str, np.ndarray]:
    """What a generator answers beside these ids: one value for all of them, or one each."""
    size = len(token_ids)
    return {
        "token_ids": np.array(token_ids, np.int32),
        "logp_behavior": np.broadcast_to(np.float32(logp), size).copy(),
        "policy_version": np.broadcast_to(np.int32(version), size).copy(),
    }


def finish(
    forest: Forest, turn: ForestTurn, reason: str, stop: Sequence[str] = (), text: str | None = None
) -> ChatMessage:
    """The turn has been sampled and read: what the agent is answered."""
    return forest.read(turn, asyncio.run(forest.reader.parsed(forest.end(turn, reason, stop, text))))

"""Trajectories of faulty environment servers: each differs from a good one in one field, in one of many ways."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from rl.wire.messages import Trajectory, Turn
from tests.rollout.trajectories import with_sequence

ABSURD = (math.nan, math.inf, -math.inf, 1e300, -1e300)


def _changed(trajectory: Trajectory, pick: Random, name: str, value: Any, *, generated: bool = True) -> Trajectory:
    """Another value at one place of a column, at a generated token or at one that was read."""
    sequence = trajectory.sequence
    column = sequence.columns[name].copy()
    column[pick.choice(np.flatnonzero((sequence.loss_mask != 0) == generated).tolist())] = value
    return with_sequence(trajectory, None, **{name: column})


def _token_ids(trajectory: Trajectory, pick: Random, vocabulary: int) -> Trajectory:
    value = pick.choice([-1, -(2**31), vocabulary, 2**31 - 1])
    return _changed(trajectory, pick, "token_ids", value, generated=pick.random() < 0.5)


def _logp(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    return _changed(trajectory, pick, "logp_behavior", pick.choice([math.nan, math.inf, -math.inf, 0.5, 50.0, -1e6]))


def _loss_mask(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    """A place flipped, a value that is no flag, nothing or everything masked."""
    mask = trajectory.sequence.loss_mask
    place = pick.randrange(mask.size)
    flipped = mask.copy()
    flipped[place] = pick.choice([1 - mask[place], 2, 255])
    return with_sequence(trajectory, loss_mask=pick.choice([flipped, np.zeros_like(mask), np.ones_like(mask)]))


def _policy_version(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    """Of the future, of the past, none; or one where nothing was generated."""
    if pick.random() < 0.2:
        return _changed(trajectory, pick, "policy_version", 3, generated=False)
    return _changed(trajectory, pick, "policy_version", pick.choice([-1, -7, 0, 1, 2, 1000, 2**31 - 1]))


def _turns(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    turns = list(trajectory.sequence.turns)
    place = pick.randrange(len(turns))
    turn = turns[place]
    shift = pick.choice([-1, 1])
    turns[place] = pick.choice(
        [
            replace(turn, start=turn.start + shift),
            replace(turn, end=turn.end + shift),
            replace(turn, start=turn.end),
            replace(turn, end=2**40),
            replace(turn, generate_s=pick.choice([*ABSURD, -1.0])),
            replace(turn, env_s=pick.choice([*ABSURD, -1.0])),
        ]
    )

    one_more: list[Turn] = [*trajectory.sequence.turns, replace(turn, reward=0.0)]
    return with_sequence(trajectory, pick.choice([turns, turns, turns, one_more, trajectory.sequence.turns[1:]]))


def _reward(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    """Of the episode, or of a turn; absurd, or not the sum of its turns."""
    if pick.random() < 0.5:
        return replace(trajectory, reward=pick.choice([*ABSURD, trajectory.reward + 1]))
    turns = list(trajectory.sequence.turns)
    place = pick.randrange(len(turns))
    turns[place] = replace(turns[place], reward=pick.choice([*ABSURD, turns[place].reward - 1]))
    return with_sequence(trajectory, turns)


def _identity(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    name = pick.choice(["sample_id", "group_id", "task_index"])
    return replace(trajectory, **{name: getattr(trajectory, name) + pick.choice([-1, 1, 10**6])})


def _kind(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    return replace(trajectory, kind="eval" if trajectory.kind == "train" else "train")


def _columns(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    """One is missing, too many, of another length or of another type."""
    sequence = trajectory.sequence
    name = pick.choice(sorted(sequence.columns))
    column = sequence.columns[name]
    wrong = pick.choice(
        [
            {name: column[1:]},
            {name: np.concatenate([column, column[:1]])},
            {name: column.astype(np.int64)},
            {name: column.reshape(1, -1)},
            {"unheard_of": column},
            {},
        ]
    )

    kept = {other: values for other, values in sequence.columns.items() if other != name}
    return replace(trajectory, sequences=[replace(sequence, columns=(sequence.columns if wrong else kept) | wrong)])


def _sequences(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    return replace(trajectory, sequences=trajectory.sequences * pick.choice([0, 2]))


def _numbers(trajectory: Trajectory, pick: Random, _: int) -> Trajectory:
    return pick.choice(
        [
            replace(trajectory, tokens_generated=int(trajectory.sequence.loss_mask.sum()) - 1),
            replace(trajectory, tokens_generated=pick.choice([-1, 2**31 + 1, 2**60])),
            replace(trajectory, seconds=pick.choice([*ABSURD, -1.0])),
            replace(trajectory, info={"legal": pick.choice(ABSURD)}),
            replace(trajectory, info={str(number): 0.0 for number in range(257)}),
            replace(trajectory, info={"n" * 65: 0.0}),
        ]
    )


CORRUPTIONS: dict[str, Callable[[Trajectory, Random, int], Trajectory]] = {
    "token_ids": _token_ids,
    "logp_behavior": _logp,
    "loss_mask": _loss_mask,
    "policy_version": _policy_version,
    "turns": _turns,
    "reward": _reward,
    "ids": _identity,
    "kind": _kind,
    "columns": _columns,
    "sequences": _sequences,
    "numbers": _numbers,
}

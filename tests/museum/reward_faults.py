"""Pieces where meaning enters: rewards, judges, advantages, and which turns of an episode are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from torch import Tensor

from rl.wire.messages import BatchPart, Ticket, Trajectory
from rollout.episodes.environment import ChatMessage, RewardFailed, Step
from tests.museum.faults import assembled, fault
from tests.museum.lab import Game, Lab
from tests.rollout.trajectories import turns_apart


@fault("reward-shuffled", "advantage-sign")
def reward_shuffled(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    from rl.learner import credit

    shaped = credit.shaped_rewards
    patch.setattr(credit, "shaped_rewards", lambda batch_part, algorithm: shaped(batch_part, algorithm).roll(1))


def estimated(
    lab: Lab, change: Callable[[Callable[[Tensor, Tensor], Tensor]], Callable[[Tensor, Tensor], Tensor]]
) -> None:
    algorithm = lab.trainer.algorithm
    spec = algorithm.estimator.spec
    spoilt = replace(algorithm.estimator, spec=replace(spec, function=change(spec.function)))
    lab.trainer.algorithm = replace(algorithm, estimator=spoilt)


@fault("group-mixed", "advantage-sign")
def group_mixed(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    estimated(lab, lambda plain: lambda rewards, group: plain(rewards, group // 2))


@fault("not-centred", "advantage-sign")
def not_centred(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    estimated(lab, lambda plain: lambda rewards, group: rewards.float())


@fault("sign-flipped", "advantage-sign")
def sign_flipped(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    estimated(lab, lambda plain: lambda rewards, group: -plain(rewards, group))


def forked(lab: Lab) -> None:
    """Of every episode each turn stands in a sequence of its own, the last one first."""

    def apart(trajectories: list[Trajectory]) -> list[Trajectory]:
        return [msgspec.structs.replace(each, sequences=turns_apart(each.sequence)[::-1]) for each in trajectories]

    vars(lab)["delivered"] = apart


@fault("credit-by-sequence", "credit-order", "algo.advantage=turn")
def credit_by_sequence(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The learner counts the turns of a sample as its sequences are listed."""
    from rl.models import packing

    def listed(batch_part: BatchPart, sequences: list[int]) -> np.ndarray:
        lengths = [batch_part.lengths[i] for i in sequences]
        return np.arange(len(sequences)).repeat(lengths)  # one turn each

    forked(lab)
    patch.setattr(packing, "_sample_turns", listed)


@fault("turns-unordered", "batch-contradicts")
def turns_unordered(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    forked(lab)
    assembled(lab, lambda batch_part: {"turn_order": []})


@fault("turns-dropped", "failing-episodes")
def turns_dropped(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """A server leaves out the sequence of a helper, and what it earned, at first."""
    end = lab.end

    def without_first(ticket: Ticket, trajectory: Trajectory) -> None:
        first, *others = turns_apart(trajectory.sequence)
        if ticket.attempt == 0 and ticket.sample_id % 2 and others:
            reward = trajectory.reward - first.turns[0].reward
            trajectory = msgspec.structs.replace(trajectory, sequences=others, reward=reward)
        end(ticket, trajectory)

    vars(lab)["end"] = without_first


@fault("reward-function-fails", "reward-failed")
def reward_function_fails(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    plain = Game.judge

    def judge(self: Game, ids: list[int]) -> float:
        if ids[0] % 4 == 0:
            raise RewardFailed(f"my_rewards:even raised KeyError: {ids[0]}")
        return plain(self, ids)

    patch.setattr(Game, "judge", judge)


@fault("reward-not-finite", "reward-failed")
def reward_not_finite(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """Of one type of tasks, as a mean over no test is."""
    plain = Game.judge
    patch.setattr(Game, "judge", lambda self, ids: plain(self, ids) if self.task % 2 else float("nan"))


def without_opinion(lab: Lab, about: Callable[[int], bool]) -> None:
    """The reward function answers None about such tasks."""

    class Unsure(Game):
        async def step(self, action: str, *, truncated: bool = False) -> Step:
            step = await super().step(action, truncated=truncated)
            return replace(step, reward=None) if about(self.task) else step

    lab.environment = Unsure


@fault("no-opinion", "judge-never")
def no_opinion(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """A function that forgets its `return`: nothing is trained."""
    without_opinion(lab, lambda task: True)


@fault("member-without-opinion", "task-type-never", "alarms.limits.task-type-never.groups=2")
def member_without_opinion(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """One of two environments of a mixture."""
    without_opinion(lab, lambda task: task % 2 == 0)
    patch.setattr(Game, "info", lambda self: {})

    def labelled(trajectories: list[Trajectory]) -> list[Trajectory]:
        return [msgspec.structs.replace(each, label="ab"[each.task_index % 2]) for each in trajectories]

    vars(lab)["delivered"] = labelled


@fault("judge-always", "judge-always")
def judge_always(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Game, "judge", lambda self, ids: 1.0)


@fault("judge-never", "judge-never")
def judge_never(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Game, "judge", lambda self, ids: 0.0)


@fault("groups-constant", "constant-groups")
def groups_constant(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    class ByTask(Game):
        async def reset(self, task: int) -> list[ChatMessage]:
            self.task = task
            return await super().reset(task)

        def judge(self, ids: list[int]) -> float:
            return float(self.task % 2)

    lab.environment = ByTask


@fault("judge-unwell", "failing-episodes")
def judge_unwell(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    end = lab.end

    def sometimes(ticket: Ticket, trajectory: Trajectory) -> None:
        if ticket.attempt == 0 and ticket.sample_id % 2:
            lab._carry_out(lab.core.failed(ticket.ticket_id, "step ran past env.step_deadline_s", 0.0))
        else:
            end(ticket, trajectory)

    vars(lab)["end"] = sometimes


@fault("sample-twice", "batch-contradicts")
def sample_twice(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    assembled(lab, lambda batch_part: {"rows": [batch_part.rows[0], *batch_part.rows[:-1]]})

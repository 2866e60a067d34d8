"""Pieces that show over several batches: types of tasks, the form of answers, redundancy, slow processes."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from rl.wire.messages import Ticket, Trajectory, Turn
from tests.museum.faults import fault
from tests.museum.lab import Game, Lab


@fault("rounding-grows", "log-ratio-grows", at=3, steps=6)
def rounding_grows(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """A third of what `log-ratio` allows."""
    columns = lab.engine.columns
    noise = np.random.default_rng(0)

    def drifted(ids: list[int], logp: list[float]) -> dict[str, np.ndarray]:
        found = columns(ids, logp)
        if lab.step >= 3:
            found["logp_behavior"] += noise.normal(0, 1e-3, len(ids)).astype(np.float32)
        return found

    vars(lab.engine)["columns"] = drifted


@fault("inexact-late", "not-exact", "rollout.alpha=1", "alarms.exact=1e-4", at=3, steps=6)
def inexact_late(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """One token of an answer, by a thousandth of a nat; when its batch is trained, the weights have gone on."""
    columns = lab.engine.columns

    def touched(ids: list[int], logp: list[float]) -> dict[str, np.ndarray]:
        found = columns(ids, logp)
        if lab.step >= 3:
            found["logp_behavior"][0] += np.float32(1e-3)
        return found

    vars(lab.engine)["columns"] = touched


@fault("steps-too-large", "large-steps", "learner.lr=0.1", "rollout.alpha=1", at=1, steps=5)
def steps_too_large(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The configuration itself is the fault."""


@fault("too-far-ahead", "old-samples", "rollout.alpha=1", "alarms.limits.old-samples.versions=0.5", at=1, steps=5)
def too_far_ahead(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The configuration itself is the fault."""


# ---------------------------------------------------------------- tasks and answers


@fault("unboxed", "unreadable")
def unboxed(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Game, "info", lambda self: {"invalid_share": 1.0})


@fault("limit-low", "answers-cut")
def limit_low(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """An answer ends less often by itself."""
    patch.setattr("tests.museum.lab.STOPS", [0, 1, 2])


@fault("form-forgotten", "invalid-actions", "rollout.group_size=4", at=2, steps=5)
def form_forgotten(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Game, "info", lambda self: {"invalid_share": 0.5 * (lab.step >= 2)})


@fault("type-dead", "task-type-never", "alarms.limits.task-type-never.groups=2")
def type_dead(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The judge of one type is dead."""
    judge = Game.judge
    patch.setattr(Game, "judge", lambda self, ids: judge(self, ids) if self.task % 2 else 0.0)


@fault("task-hangs", "failing-task")
def task_hangs(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    end = lab.end
    hangs: set[int] = set()

    def hung(ticket: Ticket, trajectory: Trajectory) -> None:
        hangs.add(min([ticket.task_index, *hangs]))
        if ticket.task_index in hangs:
            lab._carry_out(lab.core.failed(ticket.ticket_id, "step ran past env.step_deadline_s", 0.0))
        else:
            end(ticket, trajectory)

    vars(lab)["end"] = hung


@fault("long-cut", "long-episodes-cut", "rollout.redundant_episodes=4", "env.max_turns=6")
def long_cut(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """Of each group the two short episodes win."""

    class Long(Game):
        last_turn = 5

    made = iter(range(1_000_000))
    lab.environment = lambda: Long() if next(made) % 6 > 1 else Game()


# ---------------------------------------------------------------- processes


def played_by(change: Callable[[Turn], Turn]) -> Callable[[list[Trajectory]], list[Trajectory]]:
    """Every other episode on server and generator 1, each of its turns changed."""

    def delivered(trajectories: list[Trajectory]) -> list[Trajectory]:
        return [moved(each, place % 2) for place, each in enumerate(trajectories)]

    def moved(trajectory: Trajectory, index: int) -> Trajectory:
        sequence = trajectory.sequence
        turns = [msgspec.structs.replace(turn, generator=index) for turn in sequence.turns]
        turns = [change(turn) if index else turn for turn in turns]
        sequences = [msgspec.structs.replace(sequence, turns=turns)]
        return msgspec.structs.replace(trajectory, server=index, sequences=sequences)

    return delivered


@fault("server-slow", "slow-server", at=5, steps=8)
def server_slow(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    vars(lab)["delivered"] = played_by(lambda turn: msgspec.structs.replace(turn, env_s=turn.env_s + 1))


@fault("generator-slow", "slow-generator", at=5, steps=8)
def generator_slow(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    vars(lab)["delivered"] = played_by(lambda turn: msgspec.structs.replace(turn, generate_s=10 * turn.generate_s + 1))

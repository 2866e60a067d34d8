"""Which task the next group works on, and which group goes first.

Tasks cut off come back first, then the data in the order of a curriculum. A custom one is a `TaskSource`, made for
`rollout.curriculum=package.module:Name` as `Name(run_seed=..., tasks=..., **options)`: the order of
tasks as a function of what became of earlier groups. Its `state` goes into the journal of every checkpoint, and into
the broker's log.

`rollout.priority=package.module:Name` is a `Priority`, such as `Oldest`.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, lgamma
from typing import Any, Protocol

from rl.config.plugins import make
from rl.config.section import split_named
from rl.config.seeds import task_order
from rollout.broker.actions import GroupRecord
from rollout.broker.rules import Rules

_OWN_ENDS = frozenset({"trained", "filtered", "settled"})  # by their own rewards; other ends say nothing fair of a task
_RECENT = 1 / 32  # weight of the newest group in what is known of all
_CLASSES = 10


class TaskSource(Protocol):
    """An endless supply of task indices; its state is plain data for the journal."""

    def next(self) -> int: ...

    def ended(self, record: GroupRecord) -> None:
        """A group has ended (trained, stale, filtered, settled, redundant or failed)."""

    def state(self) -> Any:
        """Plain data for MessagePack, for the journal and for the broker's log: lists, not tuples or arrays."""

    def restore(self, state: Any) -> None:
        """Go on as the one whose state this is. Raises ValueError for the state of another curriculum."""


class ShuffledTasks:
    """Every task once per pass over the data, each pass in its own permutation (`task_order`)."""

    def __init__(self, run_seed: int, tasks: int) -> None:
        if tasks < 1:
            raise ValueError("there are no training tasks")
        self.run_seed = run_seed
        self.tasks = tasks
        self.cursor = 0
        self._order = task_order(run_seed, 0, tasks)

    def next(self) -> int:
        data_pass, place = divmod(self.cursor, self.tasks)
        if place == 0:
            self._order = task_order(self.run_seed, data_pass, self.tasks)
        self.cursor += 1
        return int(self._order[place])

    def ended(self, record: GroupRecord) -> None:
        """The order depends on nothing that happens."""

    def state(self) -> int:
        return self.cursor

    def restore(self, state: int) -> None:
        """Raises ValueError for the state of a curriculum."""
        if not isinstance(state, int):
            raise ValueError("the checkpoint was written with another rollout.curriculum than shuffled")
        self.cursor = state
        self._order = task_order(self.run_seed, state // self.tasks, self.tasks)


@dataclass(slots=True, eq=False)
class DrawnTask:
    """A task of the data on its way through the broker."""

    origin: int  # the first group that took it
    task_index: int
    cut_offs: int  # how often it was cut off (F3)


class TaskQueue:
    """Drawn tasks in order: groups open at a restore under their old ids, tasks put back (oldest first), new ones."""

    def __init__(self, source: TaskSource, data: Mapping[str, str]) -> None:
        self.source = source
        self.data = dict(data)
        self.next_group = 0
        self.trained_before = 0  # groups of other data, before this run was resumed with these
        self._front: list[tuple[bool, int, int, int, int]] = []  # (put back?, order, task, cut-offs, origin)

    def put_back(self, task: DrawnTask) -> None:
        heapq.heappush(self._front, (True, task.origin, task.task_index, task.cut_offs + 1, task.origin))

    def take(self) -> tuple[int, DrawnTask]:
        """The next group's id and what it works on."""
        if not self._front:
            group_id = self._new_id()
            return group_id, DrawnTask(group_id, self.source.next(), 0)
        put_back, order, task_index, cut_offs, origin = heapq.heappop(self._front)
        return self._new_id() if put_back else order, DrawnTask(origin, task_index, cut_offs)

    def snapshot(self, open_groups: list[tuple[int, DrawnTask]]) -> dict[str, Any]:
        """Open groups stand in front under their own ids, so that their samples keep ids and seeds."""
        reopened = [(False, group_id, a.task_index, a.cut_offs, a.origin) for group_id, a in open_groups]
        return {
            "source": self.source.state(),
            "next_group": self.next_group,
            "trained_before": self.trained_before,
            "front": sorted([*self._front, *reopened]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state["source"])
        self.next_group = state["next_group"]
        self.trained_before = state.get("trained_before", 0)
        self._front = [(bool(e[0]), e[1], e[2], e[3], e[4]) for e in state["front"]]  # sorted is a heap

    def begin_anew(self, next_group: int, trained: int) -> None:
        """Other data take the place of those of a journal: open groups and tasks that were put back are gone."""
        self.next_group = next_group
        self.trained_before = trained

    def _new_id(self) -> int:
        self.next_group += 1
        return self.next_group - 1


class Priority(Protocol):
    """Which group goes first: at issue, and in a batch. Lower goes first; ties go by issue number.

    F4 decides what is fresh enough, a priority only the order. Retries of failed members go before anything new
    whatever it says, and a group that waits for its turn too long still expires (F3).
    """

    def issue(self, task: DrawnTask) -> float:
        """The priority of a group that is about to be queued."""

    def consume(self, version: int, task: DrawnTask) -> float:
        """The priority of a finished group with v(group) = `version`."""


class Oldest:
    """F4's own order, by v. Every group comes to its turn, so nothing fresh enough is wasted."""

    def issue(self, task: DrawnTask) -> float:
        return 0.0

    def consume(self, version: int, task: DrawnTask) -> float:
        return version


class Freshest(Oldest):
    """Lowest staleness: the newest finished groups first. What it leaves behind expires: more waste and more bias
    against slow tasks than `oldest`, which a low `hold_patience` bounds for groups that are unfinished."""

    def consume(self, version: int, task: DrawnTask) -> float:
        return -version


def mixed_chance(won: float, lost: float, size: int) -> float:
    """The chance that a group of `size` episodes is neither all won nor all lost, success being Beta(won, lost).

    Beta-binomial: P(all won) = B(won + size, lost) / B(won, lost), and likewise for all lost.
    """
    whole = _log_beta(won, lost)
    return 1.0 - exp(_log_beta(won + size, lost) - whole) - exp(_log_beta(won, lost + size) - whole)


class Calibration:
    """What became of predictions: the share of recent groups that were mixed, by the chance that they had been given.

    A prediction stands for itself until groups of its class (a tenth of the unit interval) have ended, and counts as
    much as `_PRIOR` of them.
    """

    _PRIOR = 4.0

    def __init__(self) -> None:
        self.classes = [(0.0, 0.0)] * _CLASSES  # of each: mixed groups, groups; older ones count less

    def of(self, chance: float) -> float:
        mixed, groups = self.classes[self._class(chance)]
        return (self._PRIOR * chance + mixed) / (self._PRIOR + groups)

    def add(self, chance: float, is_mixed: bool) -> None:
        mixed, groups = self.classes[self._class(chance)]
        self.classes[self._class(chance)] = (
            (1 - _RECENT) * mixed + is_mixed,
            (1 - _RECENT) * groups + 1,
        )

    def _class(self, chance: float) -> int:
        return min(int(chance * _CLASSES), _CLASSES - 1)


@dataclass(eq=False)
class SuccessWeighted:
    """New tasks in the shuffled order, and between them tasks that were tried before and will likely teach something.

    A group teaches where some of its episodes win and some lose. The chance of that is `mixed_chance` under the task's
    posterior. Before its first group that is Beta(strength * m, strength * (1 - m)), where m is the recent success of
    all tasks. What its own groups won and lost is added, each counted `decay` times less with every later one, because
    the policy changes. The posterior knows nothing of a policy that learns a task by playing it. So the chances of
    known tasks, and that of new ones, are corrected by what became of those before them (`Calibration`).

    While less than `target` of the recent groups were mixed, the task that was tried longest ago, at least `rest` draws
    before, may come again. It does if its chance is above that of a new task, and at most in a share `repeat` of the
    draws. A policy that plays the same tasks over and over learns them by heart. Else the shuffled order goes on. In a
    later pass over the data a known task is taken with its chance, and never less often than with `floor`. The draws
    are a function of run seed and position, so a resumed run goes on as the uninterrupted one.
    """

    run_seed: int
    tasks: int
    group_size: int
    floor: float = 0.1
    decay: float = 0.7
    strength: float = 1.0
    target: float = 0.85
    repeat: float = 0.6
    rest: int = 64

    def __post_init__(self) -> None:
        limits = [
            (0 < self.floor <= 1, f"floor={self.floor} must lie in (0, 1]"),
            (0 <= self.decay < 1, f"decay={self.decay} must lie in [0, 1)"),
            (self.strength > 0, f"strength={self.strength} must be above 0"),
            (0 <= self.target <= 1, f"target={self.target} must lie in [0, 1]"),
            (0 <= self.repeat <= 1, f"repeat={self.repeat} must lie in [0, 1]"),
            (self.rest >= 1, f"rest={self.rest} must be at least 1"),
        ]
        if wrong := [text for holds, text in limits if not holds]:
            raise ValueError(wrong[0])

        self.group_size = max(2, self.group_size)
        self._order = ShuffledTasks(self.run_seed, self.tasks)
        self.known: dict[int, tuple[float, float]] = {}  # task: episodes won and lost, discounted
        self.success = 0.5  # of all tasks, recently
        self.mixed = 0.0  # share of recent groups
        self.calibration = {"new": Calibration(), "known": Calibration()}
        self.drawn = 0
        self.repeated = 0
        self.skipped = 0
        self._resting: deque[tuple[int, int]] = deque()  # (draw from which on it may come again, task), in that order

    def chance(self, task_index: int) -> float:
        """The chance that the next group of this task is mixed."""
        return self._calibration(task_index).of(self._posterior(task_index))

    def _calibration(self, task_index: int) -> Calibration:
        return self.calibration["known" if task_index in self.known else "new"]

    def _posterior(self, task_index: int) -> float:
        won, lost = self.known.get(task_index, (0.0, 0.0))
        prior = self.strength * min(max(self.success, 0.05), 0.95)
        return mixed_chance(prior + won, self.strength - prior + lost, self.group_size)

    def next(self) -> int:
        self.drawn += 1
        may_repeat = self.mixed < self.target and self.repeated < self.repeat * self.drawn
        if may_repeat and (again := self._rested()) is not None:
            self.repeated += 1
            return again

        for _ in range(self._order.tasks):
            position = self._order.cursor
            task_index = self._order.next()
            if task_index not in self.known or self._draw(position) < max(self.floor, self.chance(task_index)):
                return task_index
            self.skipped += 1
        return self._order.next()

    def ended(self, record: GroupRecord) -> None:
        if record.end not in _OWN_ENDS or record.success is None:
            return
        is_mixed = len(set(record.rewards)) > 1
        self._calibration(record.task_index).add(self._posterior(record.task_index), is_mixed)
        self.success += _RECENT * (record.success - self.success)
        self.mixed += _RECENT * (is_mixed - self.mixed)

        won, lost = self.known.get(record.task_index, (0.0, 0.0))
        episodes = len(record.rewards)
        self.known[record.task_index] = (
            self.decay * won + episodes * record.success,
            self.decay * lost + episodes * (1 - record.success),
        )
        self._resting.append((self.drawn + self.rest, record.task_index))

    def state(self) -> dict[str, Any]:
        return {
            "cursor": self._order.state(),
            "known": [[task, *counts] for task, counts in self.known.items()],
            "resting": [list(each) for each in self._resting],
            "recent": [self.success, self.mixed],
            "calibration": {kind: [list(each) for each in of.classes] for kind, of in self.calibration.items()},
            "drawn": self.drawn,
            "repeated": self.repeated,
            "skipped": self.skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another curriculum."""
        if not isinstance(state, dict) or "known" not in state:
            raise ValueError("the checkpoint was written with another rollout.curriculum than success")
        self._order.restore(state["cursor"])
        self.known = {int(task): (float(won), float(lost)) for task, won, lost in state["known"]}
        self._resting = deque((int(due), int(task)) for due, task in state["resting"])
        self.success, self.mixed = state["recent"]
        for kind, classes in state["calibration"].items():
            self.calibration[kind].classes = [(float(mixed), float(groups)) for mixed, groups in classes]
        self.drawn = state["drawn"]
        self.repeated = state["repeated"]
        self.skipped = state["skipped"]

    def _rested(self) -> int | None:
        """The task whose last group ended longest ago, of those worth another one; the others leave the line."""
        while self._resting and self._resting[0][0] <= self.drawn:
            _, task_index = self._resting.popleft()
            if self.chance(task_index) > self.chance(-1):  # -1: a task that nothing is known of
                return task_index
        return None

    def _draw(self, position: int) -> float:
        digest = hashlib.blake2b(b"curriculum/%d/%d" % (self._order.run_seed, position), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2.0**64


def _log_beta(a: float, b: float) -> float:
    return lgamma(a) + lgamma(b) - lgamma(a + b)


def make_priority(rules: Rules) -> Priority:
    """Raises ConfigError."""
    known = {"oldest": Oldest, "freshest": Freshest}
    priority: Priority = make("rollout.priority", rules.priority, known, ("issue", "consume"))
    return priority


def make_task_source(rules: Rules) -> TaskSource:
    """Raises ConfigError."""
    known = {"shuffled": ShuffledTasks, "success": SuccessWeighted}
    name, options = split_named(rules.curriculum)
    arguments: dict[str, Any] = {"run_seed": rules.seed, "tasks": rules.train_tasks}
    if name == "success":
        arguments["group_size"] = rules.group_size
    needs = ("next", "ended", "state", "restore")
    source: TaskSource = make("rollout.curriculum", name, known, needs, **arguments | options)
    return source

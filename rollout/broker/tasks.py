"""Which task the next group works on: tasks cut off come back first, then the data in a seeded order.

A curriculum implements `TaskSource` (it learns every group's end through `ended`) and is handed to the core.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any, Protocol

from rl.config.seeds import task_order
from rollout.broker.actions import GroupRecord


class TaskSource(Protocol):
    """An endless supply of task indices; its state is plain data for the journal."""

    def next(self) -> int: ...

    def ended(self, record: GroupRecord) -> None:
        """A group has ended (trained, stale, filtered, settled, redundant or failed)."""
        ...

    def snapshot(self) -> Any: ...

    def restore(self, state: Any) -> None: ...


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

    def snapshot(self) -> int:
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

    def __init__(self, source: TaskSource) -> None:
        self.source = source
        self.next_group = 0
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
            "source": self.source.snapshot(),
            "next_group": self.next_group,
            "front": sorted([*self._front, *reopened]),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.source.restore(state["source"])
        self.next_group = state["next_group"]
        self._front = [(bool(e[0]), e[1], e[2], e[3], e[4]) for e in state["front"]]  # sorted is a heap

    def _new_id(self) -> int:
        self.next_group += 1
        return self.next_group - 1

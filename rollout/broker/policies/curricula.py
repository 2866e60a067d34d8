"""Curricula: the order of tasks as a function of what became of earlier groups. A custom one is a `TaskSource`.

`rollout.curriculum=package.module:Name` is called as `Name(run_seed=..., tasks=..., **rollout.curriculum_options)`.
Its snapshot goes into the broker's journal with every checkpoint.
"""

from __future__ import annotations

import hashlib
from typing import Any

from rollout.broker.actions import GroupRecord
from rollout.broker.tasks import ShuffledTasks

_OWN_ENDS = frozenset({"trained", "filtered"})  # whole groups: others ended early, which says nothing fair of a task


class SuccessWeighted:
    """The shuffled order, in which a task is skipped with a probability that grows as its success nears 0 or 1.

    A task tried before is taken with probability max(floor, 4 p (1 - p)), p the moving average of its success with
    weight `decay` on what was known; a new one always. The draws are a function of run seed and position, so a
    resumed run goes on as the uninterrupted one. At most one whole pass is skipped at once.
    """

    def __init__(self, run_seed: int, tasks: int, floor: float = 0.1, decay: float = 0.5) -> None:
        if not (0 < floor <= 1 and 0 <= decay < 1):
            raise ValueError(f"floor={floor} must lie in (0, 1], decay={decay} in [0, 1)")
        self._order = ShuffledTasks(run_seed, tasks)
        self.floor = floor
        self.decay = decay
        self.success: dict[int, float] = {}
        self.skipped = 0

    def weight(self, task_index: int) -> float:
        p = self.success.get(task_index)
        return 1.0 if p is None else max(self.floor, 4 * p * (1 - p))

    def next(self) -> int:
        for _ in range(self._order.tasks):
            position = self._order.cursor
            task_index = self._order.next()
            if self._draw(position) < self.weight(task_index):
                return task_index
            self.skipped += 1
        return self._order.next()

    def ended(self, record: GroupRecord) -> None:
        if record.end not in _OWN_ENDS or record.success is None:
            return
        known = self.success.get(record.task_index, record.success)
        self.success[record.task_index] = self.decay * known + (1 - self.decay) * record.success

    def snapshot(self) -> dict[str, Any]:
        return {
            "cursor": self._order.snapshot(),
            "success": [[task, p] for task, p in self.success.items()],
            "skipped": self.skipped,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Raises ValueError for the state of another curriculum."""
        if not isinstance(state, dict) or "success" not in state:
            raise ValueError("the checkpoint was written with another rollout.curriculum than success")
        self._order.restore(state["cursor"])
        self.success = {int(task): float(p) for task, p in state["success"]}
        self.skipped = state["skipped"]

    def _draw(self, position: int) -> float:
        digest = hashlib.blake2b(b"curriculum/%d/%d" % (self._order.run_seed, position), digest_size=8).digest()
        return int.from_bytes(digest, "little") / 2.0**64

"""Batches: which groups the learner's next batch is made of (F4), and when it waits for a straggler (F5)."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from rollout.broker.actions import EmitBatch, GroupRecord
from rollout.broker.groups import Groups
from rollout.broker.records import Group, Phase, State
from rollout.broker.rules import Rules
from rollout.broker.statistics import batch_metrics
from rollout.broker.tasks import DrawnTask


class Batches:
    """`order` is that of consumption, by (v, task), lower first; among equals the task cut off most often."""

    def __init__(self, rules: Rules, groups: Groups, order: Callable[[int, DrawnTask], float]) -> None:
        self.groups = groups
        self._order = order
        self.size = rules.groups_per_batch  # B
        self.held_since: float | None
        self._ready: list[tuple[float, int, int, Group]] = []  # heap of (order, -cut-offs, number); ended ones linger
        self.clear()

    def request(self, step: int, now: float) -> None:
        """The learner wants batch `step`; it may ask for the next one while it trains (prefetch)."""
        if step >= self.groups.e:
            self.requested.setdefault(step, now)

    def add(self, group: Group) -> None:
        """A group has all its results."""
        assert group.version is not None
        self.groups.set_ready(group)
        order = self._order(group.version, group.task)
        heapq.heappush(self._ready, (order, -group.task.cut_offs, group.group_id, group))

    def is_complete(self) -> bool:
        """The learner asked for it, and B groups are ready."""
        groups = self.groups
        return groups.ready >= self.size and groups.e in self.requested and groups.e < groups.run.steps

    def is_held(self, now: float) -> bool:
        """F5: it waits, as long as its deadline allows, for groups that would expire with it."""
        if not self.groups.held_for():
            return False
        if self.held_since is None:
            self.held_since = now
        return now < self.held_since + self.groups.rules.hold_deadline_s

    def assemble(self, now: float) -> EmitBatch:
        """F4: the first B ready groups in their order; the last batch of the run if its time is over."""
        step = self.groups.e
        groups: list[Group] = []
        while len(groups) < self.size:
            _, _, _, group = heapq.heappop(self._ready)
            if group.phase is Phase.READY:
                self.groups.leave(group, Phase.BATCHED)
                groups.append(group)

        samples = [sample for group in groups for sample in group.accepted()]
        self.groups.tickets.ledger.batched(step, samples)
        batched = [sample.take_payload() for sample in samples]
        metrics = {
            "broker/wait_s": now - self.requested.pop(step),
            "broker/hold_s": 0.0 if self.held_since is None else now - self.held_since,
        }
        self.untrained[step] = groups
        self.groups.advance_to(self.groups.n, step + 1)
        self.held_since = None
        return EmitBatch(step, batched, batch_metrics(step, batched) | metrics, self.groups.run.assembled(step, now))

    def trained(self, now: float) -> list[GroupRecord]:
        """The learner has published the version that batch n made."""
        groups = self.groups
        batch = self.untrained.pop(groups.n)
        groups.stats.trained(groups.n, batch)
        groups.advance_to(groups.n + 1, groups.e)
        return [record for group in batch for record in groups.end(group, State.TRAINED, now)]

    def clear(self) -> None:
        """No batch is requested, none is untrained."""
        self.requested: dict[int, float] = {}  # step -> when the learner asked
        self.untrained: dict[int, list[Group]] = {}  # by step
        self.held_since = None

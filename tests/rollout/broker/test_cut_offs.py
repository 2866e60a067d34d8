"""No task is put off for ever: how often one may be cut off, whatever R is and in whatever order episodes end.

The bound. Let L be F1's limit of open groups, and P finite. Tasks that are drawn and not yet in a batch are at most L:
a new one is drawn only when none waits in front. F5 lets no batch go out while a task with P cut-offs or more is
unfinished and would expire, so such a task is cut off only as a finished group, by a batch of B groups that went before
it. By F4 each of those had been cut off as often or more, and they are gone now. So whenever a task comes to have
P + k + 1 cut-offs, B of those with P + k or more go: at most L - (k + 1) * B ever have so many. None has more than

    P + floor((L - 1) / B)

This holds while holds do not run out (`hold_deadline_s`) and no first token is older than what a batch may still hold.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.wire.messages import Ticket
from rollout.broker.actions import Action, EmitBatch, Finished, GroupRecord
from rollout.broker.rules import Rules
from tests.rollout.broker.driver import Driver, of

STEPS = 20
TASKS = 2000  # more than a run draws, so that the index of a task names it


def of_run(alpha: float, batch: int, spare: int, patience: int, **changes: object) -> Rules:
    values: dict[str, object] = {
        "steps": STEPS,
        "groups_per_batch": batch,
        "group_size": 1,
        "train_tasks": TASKS,
        "alpha": alpha,
        "redundant_groups": spare,
        "hold_patience": patience,
        "hold_deadline_s": 1e9,
        "max_groups_given_up": 10**6,
    }
    return Rules.model_validate(values | changes)


class Straggling(Driver):
    """Episodes begin, fail and end in any order; those of every `slow`th task seldom end before all others have.

    Keeps its own books of who was cut off how often, by whom, and waits for another group; compares after every event.
    """

    def __init__(self, rules: Rules, seed: int, slow: int) -> None:
        self.random = random.Random(seed)
        self.slow = slow
        self.begun: dict[int, int] = {}  # ticket -> version of its first token
        self.published = -1
        self.asked = 0
        self.emitted = 0
        self.newest_batch: list[tuple[int, int]] = []  # of its groups: v, how often they were cut off (negative)
        self.cut_offs: Counter[int] = Counter()  # by task, from the ends that were told
        self.waiting: set[int] = set()  # tasks that were put back and are in no group yet
        self.opened: set[int] = set()  # groups
        self.rules = rules
        super().__init__(rules, capacity=1000)

    def do(self, actions: list[Action]) -> list[Action]:
        super().do(actions)
        for action in actions:
            match action:
                case EmitBatch(step):
                    self.emitted = step + 1
                    groups = self.core.batches.untrained[step]
                    self.newest_batch = [(group.version or 0, -group.task.cut_offs) for group in groups]
                case GroupRecord(end=end) if end in ("stale", "redundant"):
                    self._cut_off(action)
                case _:
                    pass
        self._compare_opened()
        return actions

    def _cut_off(self, record: GroupRecord) -> None:
        if self.emitted == STEPS:
            return  # the run is over, and nothing is tried again
        assert record.cut_offs == self.cut_offs[record.task_index]
        if len(record.rewards) == self.rules.group_size:
            lost = (record.version or 0, -record.cut_offs)
            assert all(taken <= lost for taken in self.newest_batch), "F4: by v, then by how often it was cut off"
        else:
            assert record.cut_offs < self.rules.hold_patience, "F5: the batch waits for this one"
        self.cut_offs[record.task_index] += 1
        self.waiting.add(record.task_index)

    def _compare_opened(self) -> None:
        """New groups: what was put back goes before what is new, oldest first, and its cut-offs are all counted."""
        groups = [group for number, group in sorted(self.core.groups.open.items()) if number not in self.opened]
        for group in groups:
            self.opened.add(group.group_id)
            assert group.task.cut_offs == self.cut_offs[group.task.task_index]
            assert group.task.cut_offs or not self.waiting, "a new task goes before one that was put back"
            self.waiting.discard(group.task.task_index)
        origins = [group.task.origin for group in groups]
        assert origins == sorted(origins)

    # ------------------------------------------------------------ events

    def step(self) -> None:
        """One thing that can happen now; what is most likely to overtake a slow task is tried first."""
        self.now += 1.0
        self.confirm_cancels()
        if self.published < 0 or (self.published < self.emitted and self.random.random() < 0.5):
            self.published += 1
            self.publish(self.published)
        elif self.asked <= self.published + 1 and self.asked < STEPS and self.random.random() < 0.5:
            self.asked += 1
            self.request(self.asked - 1)
        elif self.live:
            self._episode_event(self.random.choice(list(self.live.values())))

    def _episode_event(self, ticket: Ticket) -> None:
        if ticket.ticket_id not in self.begun:
            oldest = max(ticket.version.n, self.core.groups.oldest_useful)
            if oldest <= self.published:
                self.begun[ticket.ticket_id] = self.random.randint(oldest, self.published)
                self.begin(ticket, self.begun[ticket.ticket_id])
        elif self.random.random() < 0.02:
            self.fail(ticket)
        elif ticket.task_index % self.slow or self.random.random() < 0.05:
            self.finish(ticket, self.begun[ticket.ticket_id], float(self.random.random() < 0.5))

    def play(self) -> int:
        """To the end of the run; the most cut-offs of any task."""
        for _ in range(100_000):
            if of(self.actions[-5:], Finished):
                return max(self.cut_offs.values(), default=0)
            self.step()
        raise AssertionError(f"no end: {self.core.describe()}")


def bound(rules: Rules) -> int:
    return int(rules.hold_patience) + (rules.admitted(0) - 1) // rules.groups_per_batch


@given(
    rules=st.builds(
        of_run,
        alpha=st.sampled_from([0, 0.5, 1, 2]),
        batch=st.integers(1, 3),
        spare=st.integers(1, 8),
        patience=st.integers(0, 3),
        group_size=st.integers(1, 2),
        redundant_episodes=st.integers(0, 1),
    ),
    seed=st.integers(0, 2**32),
    slow=st.integers(1, 4),
)
@settings(max_examples=60)
def test_no_task_is_cut_off_more_often_than_the_rules_allow(rules: Rules, seed: int, slow: int) -> None:
    assert Straggling(rules, seed, slow).play() <= bound(rules)


@pytest.mark.parametrize(("alpha", "batch", "spare", "patience"), [(0, 1, 8, 0), (0, 2, 6, 0), (0, 4, 4, 0)])
def test_the_bound_is_met_where_many_are_cut_off(alpha: float, batch: int, spare: int, patience: int) -> None:
    """So the bound is none that any order of work would keep: R tasks of every step lose their place."""
    rules = of_run(alpha, batch, spare, patience)
    for seed in range(5):
        straggling = Straggling(rules, seed, slow=2)
        assert bound(rules) - 1 <= straggling.play() <= bound(rules)
        assert sum(straggling.cut_offs.values()) > STEPS * spare / 2

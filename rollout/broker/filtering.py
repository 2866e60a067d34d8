"""Dynamic filtering: groups whose rewards are all equal have no advantage to learn from, and are replaced.

With `first_episodes` a group is looked at twice: when its first episodes have ended, and whole. Both look at rewards
alone, never at who was first or how long an episode was. docs/freshness.md says why that turns no task's gradient.

At most `max_filtered_per_step` a step; the next ones go on, so a batch always has B whole groups.
"""

from __future__ import annotations

from rollout.broker.groups import Groups
from rollout.broker.hooks import BrokerHook, EndGroup, Proposals
from rollout.broker.records import Group, State


class ConstantGroups(BrokerHook):
    """The core's own, where the rules filter: `rollout.filter_constant_groups`."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(None, groups)
        self._begin_step()

    def completed(self, now: float, group: Group) -> Proposals:
        outcomes = [member.outcome for member in group.accepted() if member.outcome is not None]
        rewards = {outcome.reward for outcome in outcomes}
        if len(rewards) > 1 or self._filtered + self._settled >= self.rules.max_filtered_per_step:
            return

        if group.done == self.groups.size:
            self._filtered += 1
            self._successes += sum(outcome.success for outcome in outcomes)
            yield EndGroup(group, State.FILTERED)
        else:
            self._settled += 1
            yield EndGroup(group, State.SETTLED)

    def assembled(self, now: float) -> Proposals:
        self._begin_step()
        return ()

    def in_step(self) -> dict[str, float]:
        """What it did since the last batch."""
        return {
            "filtered_groups": self._filtered,
            "filtered_successes": self._successes,
            "settled_groups": self._settled,
        }

    def _begin_step(self) -> None:
        self._filtered = 0
        self._settled = 0
        self._successes = 0.0  # of the filtered ones' samples

"""Dynamic filtering: groups whose rewards are all equal have no advantage to learn from, and are replaced.

With `first_episodes` a group is looked at twice: when its first episodes have ended, and whole. Both look at rewards
alone, never at who was first or how long an episode was. docs/freshness.md says why that turns no task's gradient.

At most `max_filtered_per_step` a step; the next ones go on, so a batch always has B whole groups.
"""

from __future__ import annotations

from rollout.broker.policy import EndGroup, Proposals, SchedulingPolicy
from rollout.broker.records import Group, State


class ConstantGroups(SchedulingPolicy):
    filtered = 0  # in the current step
    settled = 0
    successes = 0.0  # of the filtered ones' samples

    def completed(self, now: float, group: Group) -> Proposals:
        outcomes = [member.outcome for member in group.accepted() if member.outcome is not None]
        rewards = {outcome.reward for outcome in outcomes}
        if len(rewards) > 1 or self.filtered + self.settled >= self.rules.max_filtered_per_step:
            return

        if group.done == self.groups.size:
            self.filtered += 1
            self.successes += sum(outcome.success for outcome in outcomes)
            yield EndGroup(group, State.FILTERED)
        else:
            self.settled += 1
            yield EndGroup(group, State.SETTLED)

    def assembled(self, now: float) -> Proposals:
        self.filtered = self.settled = 0
        self.successes = 0.0
        return ()

    def counts(self) -> dict[str, float]:
        return {
            "filtered_groups": self.filtered,
            "filtered_successes": self.successes,
            "settled_groups": self.settled,
        }

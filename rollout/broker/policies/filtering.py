"""Dynamic filtering: groups whose rewards are all equal have no advantage to learn from, and are replaced.

At most `max_filtered_per_step` a step; the next ones are kept, so a batch always has B whole groups.
"""

from __future__ import annotations

from rollout.broker.policy import EndGroup, Proposals, SchedulingPolicy
from rollout.broker.records import Group, State


class ConstantGroups(SchedulingPolicy):
    filtered = 0  # in the current step

    def completed(self, now: float, group: Group) -> Proposals:
        rewards = {member.outcome.reward for member in group.accepted() if member.outcome is not None}
        if len(rewards) == 1 and self.filtered < self.rules.max_filtered_per_step:
            self.filtered += 1
            yield EndGroup(group, State.FILTERED, put_back=False)

    def assembled(self, now: float) -> Proposals:
        self.filtered = 0
        return ()

    def counts(self) -> dict[str, int]:
        return {"filtered_groups": self.filtered}

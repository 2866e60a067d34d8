"""`surplus="cancel"`: in the turn that assembles a batch, unfinished groups end that admission would not have without
redundancy (R), the oldest first. Those that F5 waits for are kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from rollout.broker.policy import EndGroup, Proposals, SchedulingPolicy
from rollout.broker.records import Group, Phase, State


class CancelSurplus(SchedulingPolicy):
    def assembled(self, now: float) -> Proposals:
        groups = self.groups
        excess = len(groups.open) - (groups.limit - self.rules.redundant_groups)
        chosen = list(islice(self._unneeded(), max(0, excess)))
        return [EndGroup(group, State.REDUNDANT) for group in chosen]

    def _unneeded(self) -> Iterator[Group]:
        """Unfinished groups that no batch would wait for: those with a version, oldest first, then those without.

        What has not sampled a token does not age. While tickets may go out (n >= e - S) it is of a later batch, and its
        task, were it cancelled, would begin again in the same turn. While none may, what it sampled now would fit
        no later batch, so whatever runs of it ends like the rest.
        """
        groups = self.groups
        protected = groups.ages.is_protected
        yield from groups.ages.unfinished()
        if self.groups.n >= groups.oldest_useful:
            return

        for group in groups.open.values():
            unstarted = group.phase is Phase.UNFINISHED and group.version is None and not protected(group)
            if unstarted and any(member.state is State.RUNNING for member in group.members):
                yield group

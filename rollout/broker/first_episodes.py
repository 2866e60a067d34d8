"""Which episodes of a group begin at once, and which only when the first have shown that they are worth it."""

from __future__ import annotations

from rollout.broker.records import Group, Sample
from rollout.broker.rules import Rules
from rollout.broker.tickets import Tickets


class FirstEpisodes:
    """Without `rules.first_episodes` all G + g begin at once, and nothing is left for later."""

    def __init__(self, rules: Rules, tickets: Tickets) -> None:
        self.tickets = tickets
        self.size = rules.group_size  # G
        self.members = rules.members  # G + g
        self.count = rules.first_episodes or rules.members

    def begin(self, group: Group) -> None:
        self._add(group, self.count)

    def widen(self, group: Group) -> None:
        """They have differed: the rest begins."""
        self._add(group, self.members - len(group.members))

    def replace(self, group: Group) -> None:
        """One has failed for good: the next begins, if the group has one that has not."""
        self._add(group, min(1, self.members - len(group.members)))

    def have_answered(self, group: Group) -> bool:
        """Their results are in, and the rest has not begun."""
        return group.done == self.count and len(group.members) < self.members

    def _add(self, group: Group, count: int) -> None:
        for _ in range(count):
            sample = Sample(group.group_id * self.members + len(group.members), group)
            group.members.append(sample)
            self.tickets.ledger.issue(sample)
            self.tickets.enqueue(sample)

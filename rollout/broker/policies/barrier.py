"""The per-batch barrier, a baseline: groups begin and batches are assembled only when no episode is queued or runs."""

from __future__ import annotations

from rollout.broker.policy import SchedulingPolicy
from rollout.broker.records import State


class BatchBarrier(SchedulingPolicy):
    def may_assemble(self) -> bool:
        return not self.servers.outstanding and not self.ledger.samples[State.QUEUED]

    def may_admit(self) -> bool:
        """As one round, once their tickets can go out."""
        return self.may_assemble() and self.groups.n >= self.groups.oldest_useful

"""How long the learner may wait for a batch: as long as it comes nearer. Pure, like the core.

patience = Patience(deadline_s, now)
patience.advanced(now)           # an answer has begun, grown or ended, or an episode has
patience.has_run_out(asked, now) # nothing of this for the deadline, since the learner asked
patience.must_be_told(now)       # the learner, which has the same deadline and does not see what advances
"""

from __future__ import annotations


class Patience:
    def __init__(self, deadline_s: float, now: float) -> None:
        self.deadline_s = deadline_s
        self._advanced = self._told = now

    def advanced(self, now: float) -> None:
        self._advanced = now

    def has_run_out(self, asked: float, now: float) -> bool:
        """asked: when the learner began to wait."""
        return now - max(asked, self._advanced) > self.deadline_s

    def must_be_told(self, now: float) -> bool:
        """Something has advanced since it was last told, at most four times within the deadline.

        What it hears comes later than what it is told of: its own deadline never ends before ours.
        """
        if self._advanced <= self._told or now - self._told < self.deadline_s / 4:
            return False
        self._told = now
        return True

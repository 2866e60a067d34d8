"""How long a run is: in steps, and in seconds where it ends by time. Pure, like all of the core."""

from __future__ import annotations


class Duration:
    """Time begins with the first version, and anew when the evaluation of that version has ended: that is no training.

    `steps`: the version at which the run ends; it becomes less when its time is over.
    """

    def __init__(self, steps: int, seconds: float | None) -> None:
        """seconds: None: the steps alone count."""
        self.steps = steps
        self._seconds = seconds
        self._first = -1  # version
        self._since = 0.0

    def begin(self, version: int, now: float) -> None:
        self._first = version
        self._since = now

    def evaluated(self, version: int, now: float) -> None:
        if version == self._first:
            self._since = now

    def assembled(self, step: int, now: float) -> float:
        """The share of the time that is over with the batch of this step; from 1 on it is the last one."""
        share = 0.0 if self._seconds is None else max(0.0, now - self._since) / self._seconds
        if share >= 1:
            self.steps = step + 1
        return share

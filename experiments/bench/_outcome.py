"""What a training run came to, as the bench saw it from outside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from experiments.bench._bound import Bound
from experiments.bench._processes import Used
from experiments.compare.job import Row


@dataclass(frozen=True)
class RunResult:
    """One training run, until the target or its last step."""

    rows: list[Row]
    origin: float
    reached: int | None
    """The step, counted from 1; None: never."""
    cpu_s: float
    processes: Mapping[str, Used]
    bound: Bound | None = None
    """The bound of a run of Fresco's that reached the target."""
    given_up_s: float | None = None
    """Where it was stopped because it took too long: after how many seconds. It would have needed more."""

    @property
    def wall_s(self) -> float:
        """The seconds to the target; of a run that did not get there, to its last step, or to where it was stopped."""
        if self.given_up_s is not None:
            return self.given_up_s
        return self.rows[(self.reached or len(self.rows)) - 1].time - self.origin

    def is_ahead_of(self, other: RunResult) -> bool:
        """Whether it reached the target, and the other had not by then, or had made all of its steps in vain later."""
        return self.reached is not None and self.wall_s < other.wall_s

    def seconds(self) -> dict[str, float]:
        """Where the seconds went: the start, then each part by the trainer's own name, then what no part accounts
        for."""
        rows = self.rows[: self.reached]
        parts: dict[str, float] = {}
        for row in rows:
            for name, seconds in row.parts.items():
                parts[name] = parts.get(name, 0.0) + seconds

        start = rows[0].time - self.origin - sum(rows[0].parts.values())
        rest = self.wall_s - start - sum(parts.values())
        return {"start": start, **parts, "rest": rest}

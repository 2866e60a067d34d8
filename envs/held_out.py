"""Whether held-out tasks are training tasks: one judgement, for `fresco env check` and before a run starts."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from envs.mixture import MixtureFamily
from rl.config.schema import Config, ConfigError
from rl.observe.alarms import limit, line

_ALARM = "eval-on-train"
_FEW = 0.5  # share of different training tasks below which each occurs twice, so that held-out ones must occur again
_LOOKED_AT = 20_000  # training tasks, evenly spread


@dataclass(frozen=True)
class Seen:
    """How many of one environment's held-out tasks are training tasks too.

    few: training tasks repeat each other, as in a game of few positions. Then nothing can be held out, and no run ends.
    """

    what: str
    held_out: int
    share: float
    few: bool

    @classmethod
    def of(cls, trained: Sequence[Hashable], held_out: Sequence[Hashable], few: float = _FEW, what: str = "") -> Seen:
        """few: the share of different training tasks below which they are few."""
        known = set(trained)
        share = sum(task in known for task in held_out) / max(1, len(held_out))
        return cls(f"{what}held-out tasks", len(held_out), share, len(known) < few * len(trained))

    def __str__(self) -> str:
        few = "; the game has few tasks" if self.few else ""
        return f"{self.share:.0%} of {self.held_out} {self.what} are training tasks{few}"


def knows_tasks(family: Any) -> bool:
    """False before the start of a family, or of a mixture's member, whose tasks are made in it."""
    members = [each.family for each in family.members.values()] if isinstance(family, MixtureFamily) else [family]
    return all(getattr(each, "knows_tasks", True) for each in members)


def seen_in_training(family: Any, held_out: int) -> Iterator[Seen]:
    """Of the first held-out tasks, as they are written: of each member of a mixture by itself."""
    if not isinstance(family, MixtureFamily):
        yield _seen(family, held_out, "")
        return
    counts = Counter(family.task("eval", index).label for index in range(held_out))
    for label, member in family.members.items():
        yield _seen(member.family, counts[label], f"{label}'s ")


def check_held_out(config: Config, family: Any) -> None:
    """Raises ConfigError where held-out tasks are trained, unless the game has so few; then that is said."""
    for seen in seen_in_training(family, config.eval.tasks) if config.steps else ():
        if seen.share <= limit(config.alarms, _ALARM, "share"):
            continue
        if not seen.few:
            raise ConfigError(line(_ALARM, str(seen)))
        print(f"! {seen}: evaluations say how well it is played, not what was learned beyond", file=sys.stderr)


def _seen(family: Any, held_out: int, what: str) -> Seen:
    count = family.task_count("train")
    trained = [repr(family.task("train", index)) for index in range(0, count, 1 + count // _LOOKED_AT)]
    return Seen.of(trained, [repr(family.task("eval", index)) for index in range(held_out)], what=what)

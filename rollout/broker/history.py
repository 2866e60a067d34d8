"""Going back: batches that are taken back after the learner's death, and the journal that a checkpoint holds.

**Taking back** (`History`). A learner that was killed trains the batches since its checkpoint again. If version m comes
out otherwise than before, it is published in a new timeline. Whatever holds tokens of the earlier version m or of later
ones then ends `stale`: all batches from step m on, trained or not, and open groups. Groups that are complete and wholly
older stay. So what counts as trained is what the weights have seen, and no sample is trained twice.

**The journal** (`snapshot`, `restore`) is the broker's part of a checkpoint at version n, as data for MessagePack. Open
groups (queued, running, waiting, batched) leave the ledger with their samples and tokens. They stand in front of the
data under their old ids, with their cut-offs: the restored core issues them anew, with the same seeds. What had ended
stays counted. So the ledger closes before and after, and nothing trained can be trained again: tickets of the old
timeline have ids that the new timeline does not know. With other data (`resume_data=new`) what stood in front is gone,
and the order begins anew. Pending evaluations are not part of it; the learner asks for what
it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from rl.wire.messages import Version
from rollout.broker.actions import EpisodeOutcome, GroupRecord
from rollout.broker.batches import Batches
from rollout.broker.evaluation import Evaluations
from rollout.broker.groups import Groups
from rollout.broker.records import NAMES, Group, Phase, State
from rollout.broker.statistics import Statistics, Tally

_FORMAT = 2
_ByState = Annotated[list[int], msgspec.Meta(min_length=len(State), max_length=len(State))]


class _Tasks(msgspec.Struct):
    source: Any  # a curriculum's own
    next_group: int
    front: list[tuple[bool, int, int, int, Any]]
    trained_before: int = 0


class _Counters(msgspec.Struct):
    issued: int
    samples: _ByState
    tokens: _ByState
    generated: int
    lost: int
    attempts_with_tokens: int
    mismatches: int
    first_mismatch: str


class _Journal(msgspec.Struct):
    """The types of a journal, which may come from anywhere."""

    n: int
    group_size: int
    members: int
    tasks: _Tasks
    ledger: _Counters
    stats: dict[str, Any]
    seconds: float = 0.0
    seed: int = 0
    data: dict[str, str] = {}


@dataclass(slots=True, eq=False)
class Trained:
    """What a step was made of, for as long as it may be taken back."""

    groups: list[Group]
    outcomes: list[EpisodeOutcome]
    staleness: dict[int, int]  # of everything trained before this step
    kept: Tally


class History:
    def __init__(self, batches: Batches, evaluations: Evaluations) -> None:
        self._batches = batches
        self._evaluations = evaluations
        self._groups = batches.groups
        self._steps: dict[int, Trained] = {}

    def trained(self, now: float) -> list[GroupRecord]:
        """The learner has published the version that batch n made."""
        n = self._groups.n
        batch = self._batches.untrained[n]
        outcomes = [member.outcome for group in batch for member in group.members if member.outcome is not None]
        stats = self._groups.stats
        self._steps[n] = Trained(batch, outcomes, dict(stats.staleness), copy(stats.kept))
        return self._batches.trained(now)

    def forget(self, before: int) -> None:
        """A checkpoint has what the steps before this one made."""
        self._steps = {step: trained for step, trained in self._steps.items() if step >= before}

    @property
    def since(self) -> int:
        """The oldest version to which it reaches back."""
        return min(self._steps, default=self._groups.n)

    def roll_back(self, version: Version, now: float) -> list[GroupRecord]:
        """Version n, and whatever came of it, never was: `version` has its number, not older than `since`."""
        n = version.n
        for step in reversed(range(n, self._groups.n)):
            self._take_back(self._steps.pop(step))

        groups = self._groups
        stale = [group for group in groups.open.values() if not _is_older(group, n)]
        records = [record for group in stale for record in groups.end(group, State.STALE, now)]
        self._batches.clear()
        groups.advance_to(n, n)
        groups.tickets.begin(version.timeline)
        self._evaluations.roll_back(version)
        return records

    def _take_back(self, step: Trained) -> None:
        groups = self._groups
        groups.stats.staleness = step.staleness
        groups.stats.kept = step.kept
        for outcome in step.outcomes:
            groups.stats.cut_finished(NAMES[State.STALE], outcome)

        for group in step.groups:
            for member in group.members:
                if member.state is State.TRAINED:
                    groups.tickets.ledger.move(member, State.STALE)
            groups.tasks.put_back(group.task)


def _is_older(group: Group, n: int) -> bool:
    """Whether it is complete, and no token of it is of version n or later."""
    if group.phase is not Phase.READY:
        return False
    outcomes = [member.outcome for member in group.accepted() if member.outcome is not None]
    return all(outcome.newest_version is not None and outcome.newest_version < n for outcome in outcomes)


def snapshot(groups: Groups) -> dict[str, Any]:
    members = [sample for group in groups.open.values() for sample in group.members]

    return {
        "format": _FORMAT,
        "timeline": groups.tickets.timeline,
        "n": groups.n,
        "seconds": groups.run.spent_s,
        **{name: getattr(groups.rules, name) for name in ("group_size", "members")},
        "data": groups.tasks.data,
        "seed": groups.rules.seed,
        "tasks": groups.tasks.snapshot([(group.group_id, group.task) for group in groups.open.values()]),
        "ledger": groups.tickets.ledger.snapshot(members),
        "stats": msgspec.to_builtins(groups.stats),
    }


def restore(groups: Groups, state: dict[str, Any], new_data: bool) -> None:
    """Raises ValueError if the journal is damaged, of another format, of other data, or of groups of another size
    (sample ids would clash)."""
    if state["format"] != _FORMAT:
        raise ValueError(f"journal of format {state['format']}, this broker reads {_FORMAT}")
    if groups.tickets.timeline >= 0 or groups.open:
        raise ValueError("a broker that has begun cannot be restored")
    try:
        msgspec.convert(state, _Journal)
    except msgspec.ValidationError as error:
        raise ValueError(f"the journal is damaged: {error}") from None

    rules = groups.rules
    then = {"group_size": state["group_size"], "redundant_episodes": state["members"] - state["group_size"]}
    for name, value in then.items():
        if value != getattr(rules, name):
            raise ValueError(f"rollout.{name}={getattr(rules, name)}: its groups have {value}; set it as it was")

    trains = rules.steps > state["n"]  # an evaluation takes whatever tasks it likes
    other = _other_data(state.get("data", {}), groups.tasks.data) if trains else ""
    seed = state.get("seed", rules.seed)
    if not other and trains and seed != rules.seed:  # it is the order that a cursor counts in
        other = f"seed={rules.seed}: the data stood in the order of seed={seed}"
    if other and not new_data:
        raise ValueError(f"{other}; give it the same, or set resume_data=new to begin with their first row")

    groups.advance_to(state["n"], state["n"])
    groups.run.go_on(state.get("seconds", 0.0))
    groups.tickets.ledger.restore(state["ledger"])
    if other or (new_data and not state.get("data")):
        trained = groups.tickets.ledger.samples[State.TRAINED] // rules.group_size
        groups.tasks.begin_anew(state["tasks"]["next_group"], trained)
    else:
        groups.tasks.restore(state["tasks"])
    groups.stats = msgspec.convert(state["stats"], Statistics, strict=False)


def _other_data(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """How the data differ from those of the journal; empty if they do not, or if one of both does not say what it has.

    Where they lie does not matter, only how many tasks they are and their digest.
    """
    if not then or not now:
        return ""
    lines = []
    for name in sorted({*then, *now}):
        before, after = then.get(name, "nothing"), now.get(name, "nothing")
        if _known_by(before) != _known_by(after):
            lines.append(f"{name} was trained on {before}, and has {after}")
    if not lines and list(then) != list(now):
        lines.append(f"members stood in the order {', '.join(then)}, and stand in the order {', '.join(now)}")
    return ", ".join(lines)


def _known_by(line: str) -> tuple[str, str]:
    return line.partition(" ")[0], line.rpartition(" ")[2]

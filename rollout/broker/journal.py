"""The broker's part of a checkpoint at version n, as plain data that MessagePack can carry.

Open groups (queued, running, waiting, batched) leave the ledger with their samples and tokens and stand
in front of the data under their old ids, with their cut-offs: the restored core issues them anew, with the same
seeds. What had ended stays counted. So the ledger closes before and after, and nothing trained can be trained again:
tickets of the old timeline have ids that the new timeline does not know.
Pending evaluations are not part of it; the learner asks for what it needs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from rollout.broker.groups import Groups
from rollout.broker.statistics import Statistics

_FORMAT = 2


def snapshot(groups: Groups) -> dict[str, Any]:
    members = [sample for group in groups.open.values() for sample in group.members]
    return {
        "format": _FORMAT,
        "timeline": groups.tickets.timeline,
        "n": groups.n,
        "group_size": groups.rules.group_size,
        "members": groups.rules.members,
        "tasks": groups.tasks.snapshot([(group.group_id, group.task) for group in groups.open.values()]),
        "ledger": groups.tickets.ledger.snapshot(members),
        "stats": msgspec.to_builtins(groups.stats),
    }


def restore(groups: Groups, state: dict[str, Any]) -> None:
    """Raises ValueError if the journal is of another format or of groups of another size (sample ids would clash)."""
    if state["format"] != _FORMAT:
        raise ValueError(f"journal of format {state['format']}, this broker reads {_FORMAT}")
    if groups.tickets.timeline >= 0 or groups.open:
        raise ValueError("a broker that has begun cannot be restored")
    rules = groups.rules
    then = {"group_size": state["group_size"], "redundant_episodes": state["members"] - state["group_size"]}
    for name, value in then.items():
        if value != getattr(rules, name):
            raise ValueError(f"rollout.{name}={getattr(rules, name)}: its groups have {value}; set it as it was")

    groups.advance_to(state["n"], state["n"])
    groups.tasks.restore(state["tasks"])
    groups.tickets.ledger.restore(state["ledger"])
    groups.stats = msgspec.convert(state["stats"], Statistics, strict=False)

"""The broker's part of a checkpoint at version n, as plain data that MessagePack can carry.

Open groups (queued, running, waiting, batched) leave the ledger with their samples and tokens and stand
in front of the data under their old ids, with their attempts: the restored core issues them anew, with the same
seeds. What had ended stays counted. So the ledger closes before and after, and nothing trained can be trained again:
tickets of the old epoch have ids that the new epoch does not know.
Pending evaluations are not part of it; the learner asks for what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rollout.broker.statistics import Statistics

if TYPE_CHECKING:
    from rollout.broker.lifecycle import Lifecycle

_FORMAT = 1


def snapshot(core: Lifecycle) -> dict[str, Any]:
    leaving = [sample for group in core.groups.values() for sample in group.members]
    return {
        "format": _FORMAT,
        "epoch": core.epoch,
        "n": core.n,
        "group_size": core.settings.group_size,
        "members": core.settings.members,
        "tasks": core.tasks.snapshot([(group.group_id, group.assignment) for group in core.groups.values()]),
        "ledger": core.ledger.snapshot(leaving),
        "stats": msgspec.to_builtins(core.stats),
    }


def restore(core: Lifecycle, state: dict[str, Any]) -> None:
    """Raises ValueError if the journal is of another format or of groups of another size (sample ids would clash)."""
    if state["format"] != _FORMAT:
        raise ValueError(f"journal of format {state['format']}, this broker reads {_FORMAT}")
    if core.started or core.groups:
        raise ValueError("a broker that has begun cannot be restored")
    sizes = {"group_size": core.settings.group_size, "members": core.settings.members}
    for name, size in sizes.items():
        if state[name] != size:
            raise ValueError(f"the checkpoint has {name}={state[name]}, the configuration {size}")
    core.e = state["n"]
    core.advance(state["n"])
    core.tasks.restore(state["tasks"])
    core.ledger.restore(state["ledger"])
    core.stats = msgspec.convert(state["stats"], Statistics, strict=False)

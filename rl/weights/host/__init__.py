"""Channels through the memory of hosts: `shm` on one machine, `tcp` between several, `zmq` without shared memory.

All lay the tensors of a version out as bytes (`layout`), in one of several slots (`slots`), with digests of ranges.
What they have in common is `ends`; `shm`, `tcp` and `frames` say where the slots are and how a receiver comes to the
bytes.
"""

from __future__ import annotations

from rl.config.schema import Config
from rl.weights.host.shm_file import check_space, remove_slots, sweep_stale


def make_room(config: Config, version_bytes: int) -> None:
    """Remove, before a run, what dead runs left, and raise ConfigError if so many bytes a version find no room."""
    sweep_stale()
    if config.channel in ("shm", "tcp") and version_bytes:
        check_space(version_bytes, config.weights.slots)


def clean_up(run_id: str) -> None:
    """Remove what the run left, when all its processes have ended."""
    remove_slots(run_id)

"""Which weights every version has, tensor by tensor: `<run>/digests.jsonl`, a line for each, as a replay reads it.

The digests (rl/learner/tensor_digests.py) are of the tensors that are trained, and do not depend on how many ranks hold
them. Of lines with the same n the last counts, and a new timeline ends what was known from its first n on.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from rl.config.damage import read_lines

FILE = "digests.jsonl"


class VersionDigests(msgspec.Struct):
    timeline: int
    n: int
    tensors: dict[str, str]


def read_version_digests(run_folder: Path) -> dict[int, dict[str, str]]:
    """The digests by version, as far as they can be read."""
    found: dict[int, dict[str, str]] = {}
    timeline = 0
    for line in read_lines(run_folder / FILE, VersionDigests):
        if line.timeline != timeline:
            found = {n: tensors for n, tensors in found.items() if n < line.n}
        timeline = line.timeline
        found[line.n] = line.tensors
    return found

"""Trained batches on disk (`tracking.save_batches`), to look at what was trained or to compare two runs.

One file per step and rank, `<run>/batches/<step>.<rank>.msgpack`: the frames of the Shard message, as received.
"""

from __future__ import annotations

from pathlib import Path

import msgpack

from rl.core.messages import Shard, decode, encode

FOLDER = "batches"


def write_shard_file(run_folder: Path, shard: Shard) -> None:
    folder = run_folder / FOLDER
    folder.mkdir(exist_ok=True)
    frames = [bytes(frame) for frame in encode(shard)]
    (folder / f"{shard.step:06d}.{shard.rank}.msgpack").write_bytes(msgpack.packb(frames))


def read_shard_files(run_folder: Path) -> list[Shard]:
    """Every saved shard, by step and rank. Raises ProtocolError for a damaged file."""
    shards = []
    for path in sorted((run_folder / FOLDER).glob("*.msgpack")):
        shard = decode(msgpack.unpackb(path.read_bytes()))
        assert isinstance(shard, Shard)
        shards.append(shard)
    return shards

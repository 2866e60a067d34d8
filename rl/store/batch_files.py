"""Batches on disk: what the broker sent to the learner since its newest checkpoint, to train it again after its death.

One file per step and rank, `<run>/batches/<step>.<rank>.msgpack`: a digest (xxh3-128) and the frames of the
BatchPart message. With
`tracking.save_batches` all of them stay, to look at what was trained or to compare two runs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import xxhash

from rl.config.damage import reading
from rl.wire.messages import BatchPart, decode, encode

FOLDER = "batches"
_DIGEST_BYTES = 16


def write_batch_part(run_folder: Path, batch_part: BatchPart) -> None:
    path = _path(run_folder, batch_part.step, batch_part.rank)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".tmp")
    frames = msgspec.msgpack.encode(encode(batch_part))
    with partial.open("wb") as file:
        file.write(xxhash.xxh3_128_digest(frames))
        file.write(frames)
    partial.replace(path)


def read_batch_part(run_folder: Path, step: int, rank: int) -> BatchPart:
    """Raises FileNotFoundError, and Damaged."""
    path = _path(run_folder, step, rank)
    content = memoryview(path.read_bytes())
    with reading(path, "resume=CHECKPOINT trains other batches instead"):
        if xxhash.xxh3_128_digest(content[_DIGEST_BYTES:]) != content[:_DIGEST_BYTES]:
            raise ValueError("its digest is another one")
        batch_part = decode(msgspec.msgpack.decode(content[_DIGEST_BYTES:]))
    assert isinstance(batch_part, BatchPart)
    return batch_part


def read_batch_parts(run_folder: Path) -> list[BatchPart]:
    """Every saved batch part, by step and rank. Raises Damaged."""
    return [read_batch_part(run_folder, *place) for place in sorted(_places(run_folder))]


def drop_batch_parts(run_folder: Path, before: int) -> None:
    """Forget the batches of earlier steps."""
    for step, rank in _places(run_folder):
        if step < before:
            _path(run_folder, step, rank).unlink()


def _path(run_folder: Path, step: int, rank: int) -> Path:
    return run_folder / FOLDER / f"{step:06d}.{rank}.msgpack"


def _places(run_folder: Path) -> list[tuple[int, int]]:
    """Step and rank of each file."""
    names = [path.name.split(".") for path in (run_folder / FOLDER).glob("*.msgpack")]
    return [(int(step), int(rank)) for step, rank, _ in names]

"""Batches on disk: what the broker sent to the learner since its newest checkpoint, to train it again after its death.

One file per step and batch part, `<run>/batches/<step>.<rank>.msgpack`: a digest (xxh3-128) and the frames of the
message, 13 bytes for each token and some hundred for each sample. Ranks that compute together have the first one's.
`tracking.replay` says which of them stay when a checkpoint has what they made: from these `fresco replay` trains the
steps again.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import xxhash

from rl.config.damage import reading
from rl.store.checkpoint_folder import steps_of
from rl.wire.messages import BatchPart, LongBatchPart, decode, encode, in_frames

FOLDER = "batches"
_DIGEST_BYTES = 16
_SHARE_OF_DISK = 0.05  # of what is free: more is not taken for batches that only a replay reads


def write_batch_part(run_folder: Path, batch_part: BatchPart) -> None:
    path = _path(run_folder, batch_part.step, batch_part.rank)
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".tmp")
    frames = msgspec.msgpack.encode(encode(in_frames(batch_part)))
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
        if isinstance(batch_part, LongBatchPart):
            batch_part = batch_part.joined()
    assert isinstance(batch_part, BatchPart)
    return batch_part


def read_batch_parts(run_folder: Path) -> Iterator[BatchPart]:
    """Every saved batch part, by step and rank, one at a time. Raises Damaged."""
    for place in sorted(_places(run_folder)):
        with contextlib.suppress(FileNotFoundError):  # a run that goes on has dropped it meanwhile
            yield read_batch_part(run_folder, *place)


def steps_kept(run_folder: Path) -> list[int]:
    """The steps whose batches are there."""
    return sorted({step for step, _ in _places(run_folder)})


def drop_unneeded(run_folder: Path, trained: int, replay: str) -> None:
    """A checkpoint has what came before step `trained`. What stays for a replay `tracking.replay` says: of `recent`
    what follows the oldest checkpoint before that one, or the start."""
    size = sum(path.stat().st_size for path in (run_folder / FOLDER).glob("*.msgpack"))
    if replay == "recent" and size <= _SHARE_OF_DISK * shutil.disk_usage(run_folder).free:
        trained = min((step for step in steps_of(run_folder / "checkpoints") if step < trained), default=0)
    for step, rank in _places(run_folder):
        if step < trained and replay != "full":
            _path(run_folder, step, rank).unlink()


def _path(run_folder: Path, step: int, rank: int) -> Path:
    return run_folder / FOLDER / f"{step:06d}.{rank}.msgpack"


def _places(run_folder: Path) -> list[tuple[int, int]]:
    """Step and rank of each file; a copy under another name is none of ours."""
    names = [path.name.split(".") for path in (run_folder / FOLDER).glob("*.*.msgpack")]
    return [(int(name[0]), int(name[1])) for name in names if len(name) == 3 and (name[0] + name[1]).isdecimal()]

"""Digests of files, written beside them: what was damaged on disk is found before it is used.

    write_digests(folder, folder / DIGESTS)
    ...
    if changed := damage(folder, folder / DIGESTS):
        raise CheckpointError(f"{changed} is not as it was written")

The digests are JSON, {path below the folder: xxh3-128}; of a single file the path is empty. `*` is the digest of all
others, so that a dropped line is noticed.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

DIGESTS = "digests.json"
"""The name of the file, in a folder, with the digests of its files."""
FileDigest = xxhash.xxh3_128
"""Of a file that comes part by part."""
_ALL = "*"


def write_digests(target: Path, kept: Path) -> None:
    """Digests of `target`, a file or all regular files below a folder, in the file `kept`; on disk on return."""
    below = sorted(path for path in target.rglob("*") if path.is_file() and not path.is_symlink())
    names = [str(path.relative_to(target)) for path in below if path != kept] if target.is_dir() else [""]
    found = _digests(target, names)
    write_synced(kept, json.dumps(found | {_ALL: _together(found)}).encode())


def written_digests(folder: Path) -> dict[str, str]:
    """The digests that stand in a folder, by path; none where nobody wrote any."""
    try:
        written = dict(json.loads((folder / DIGESTS).read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
    return {path: digest for path, digest in written.items() if path != _ALL}


def digest_of(files: Iterable[Path]) -> str:
    """One digest of the content of several files, whatever their folder is called."""
    return _together({path.name: file_digest(path) for path in sorted(files)})


def damage(target: Path, kept: Path) -> Path | None:
    """Returns None if every file is as it was written; else the first that is not, which may be `kept` itself.

    Files that came later are not looked at.
    """
    try:
        written = dict(json.loads(kept.read_bytes()))
        together = written.pop(_ALL, None)  # absent where an earlier Fresco wrote it
        if not written or together not in (None, _together(written)):
            return kept
        found = _digests(target, written)
    except (OSError, ValueError, TypeError) as error:
        absent = getattr(error, "filename", None)
        return Path(absent) if absent else kept
    return next((target / name for name in written if found[name] != written[name]), None)


def _together(digests: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(digests, sort_keys=True).encode())


def write_synced(path: Path, content: bytes) -> None:
    """The file's content is on disk on return; its name is once the folder is synced."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _digests(target: Path, names: Iterable[str]) -> dict[str, str]:
    names = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(file_digest, [target / name for name in names]), strict=True))


def file_digest(path: Path) -> str:
    """Of the content of one file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, FileDigest).hexdigest()

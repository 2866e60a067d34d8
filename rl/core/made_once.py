"""What is costly to make and depends on a recipe alone: made once, by one process while others wait, and kept.

    folder = cache_folder() / f"tiny-{digest(recipe.model_dump_json(), __file__)}"
    made_once(folder, lambda draft: train(recipe, draft))

Invariants: what stands under the final name is whole, because it appears there by one rename; what a killed maker has
left is removed by the next one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from filelock import AcquireReturnProxy, FileLock, Timeout


def cache_folder() -> Path:
    """`$FRESCO_CACHE`, else ~/.cache/fresco."""
    return Path(os.environ.get("FRESCO_CACHE") or Path.home() / ".cache" / "fresco")


def digest(options: str, *sources: str | Path) -> str:
    """16 hex digits that change with the options, given as text, and with the content of the source files."""
    hashed = hashlib.sha256(options.encode())
    for source in sources:
        hashed.update(Path(source).read_bytes())
    return hashed.hexdigest()[:16]


def made_once(target: Path, make: Callable[[Path], object], fits: Callable[[Path], bool] = Path.exists) -> Path:
    """`target`, a file or a folder, made first unless it is there and fits.

    `make(draft)` makes it at a path where nothing is yet, in a folder of its own that is removed afterwards. What
    stands at `target` and does not fit is replaced. Raises what `make` raises; `target` is then as it was.
    """
    if fits(target):
        return target

    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if not fits(target):  # another process may have made it meanwhile
            _make(target, make)

    return target


def to_stderr(line: str) -> None:
    """Progress of a maker: standard output may belong to a result."""
    print(line, file=sys.stderr, flush=True)


def _locked(target: Path) -> AcquireReturnProxy[FileLock]:
    lock = FileLock(f"{target}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        to_stderr(f"waiting for {target.name}, which another process makes")
        return lock.acquire()


def _make(target: Path, make: Callable[[Path], object]) -> None:
    for left in target.parent.glob(f".{target.name}.draft-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)

    scratch = Path(mkdtemp(prefix=f".{target.name}.draft-", dir=target.parent))
    try:
        draft = scratch / target.name
        make(draft)
        if target.is_dir():
            shutil.rmtree(target)
        draft.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)

"""What is costly to make and depends on a recipe alone: made once, by one process while others wait, and kept.

    folder = cache_folder() / f"tiny-{digest(recipe.model_dump_json(), __file__)}"
    made_once(folder, lambda draft: train(recipe, draft))

Invariants: what stands under the final name is whole, because it appears there by one rename. It is as it was made:
digests of its files stand beside it, and what was damaged since is made again. What a killed maker has left is removed
by the next one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from filelock import AcquireReturnProxy, FileLock, Timeout

from rl.store.digests import damage, write_digests

_MAKER = "maker.json"
_TELL_S = 5.0  # between two lines of who waits, at first
_making: list[Path] = []  # of this process, one within the other
_waits: list[float] = []


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
    stands at `target` and does not fit, or is damaged, is replaced. Raises what `make` raises; `target` is then as it
    was.
    """
    if fits(target) and _is_whole(target):
        return target

    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target):
        if not (fits(target) and _is_whole(target)):  # another process may have made it meanwhile
            _make(target, make)

    return target


def waited_s() -> float:
    """The seconds for which this process has waited for what others made: they are no work of its own."""
    return sum(_waits)


def to_stderr(line: str) -> None:
    """Progress of a maker, for its user and for whoever waits for it. Standard output may belong to a result."""
    print(line, file=sys.stderr, flush=True)
    for path in _making:
        _tell(path, line)


def _tell(path: Path, line: str) -> None:
    """Say who makes what lies beside this file, and how far it is."""
    partial = path.with_suffix(".part")
    with contextlib.suppress(OSError):  # nothing depends on it
        partial.write_text(json.dumps([os.getpid(), line]))
        partial.replace(path)


def _locked(target: Path) -> AcquireReturnProxy[FileLock]:
    """The lock of who makes it. Whoever waits says for whom, how long by now, and how far that is."""
    lock = FileLock(f"{target}.lock")
    begun = time.monotonic()
    patience_s = 0.0

    while True:
        try:
            acquired = lock.acquire(timeout=patience_s)
            if patience_s:
                _waits.append(time.monotonic() - begun)
            return acquired

        except Timeout:
            waited = f" for {time.monotonic() - begun:.0f} s" if patience_s else ""
            to_stderr(f"waiting{waited} for {target.name}, which {_maker(target)}")
            patience_s = min(60.0, max(_TELL_S, 2 * patience_s))


def _maker(target: Path) -> str:
    for path in target.parent.glob(f".{target.name}.draft-*/{_MAKER}"):
        with contextlib.suppress(OSError, ValueError):  # it may end just now
            pid, line = json.loads(path.read_text())
            return f"process {pid} makes{f' ({line})' if line else ''}"
    return "another process makes"


def _make(target: Path, make: Callable[[Path], object]) -> None:
    for left in target.parent.glob(f".{target.name}.draft-*"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)

    scratch = Path(mkdtemp(prefix=f".{target.name}.draft-", dir=target.parent))
    try:
        draft = scratch / target.name
        maker = scratch / _MAKER
        _tell(maker, "")
        _making.append(maker)
        try:
            make(draft)
        finally:
            _making.remove(maker)
        digests = scratch / "digests"
        write_digests(draft, digests)

        if target.is_dir():
            shutil.rmtree(target)
        target.unlink(missing_ok=True)
        digests.replace(_digests_of(target))  # what is under the final name is never without its digests
        draft.replace(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _digests_of(target: Path) -> Path:
    return target.with_name(f"{target.name}.digests")


def _is_whole(target: Path) -> bool:
    """Whether its files are as they were made."""
    digests = _digests_of(target)
    return digests.exists() and _undamaged(target, digests.stat().st_mtime_ns)


@cache
def _undamaged(target: Path, _digests_from: int) -> bool:
    """Found out once by each process: environments ask before every episode."""
    if changed := damage(target, _digests_of(target)):
        to_stderr(f"{changed} was damaged since it was made: {target.name} is made again")
    return changed is None

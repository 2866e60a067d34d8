"""Folders that travel between the head and an agent, part by part: written beside their place, then under their name.

Both ends name a file by its folder and its path in it, as `checkpoints/step-40/state/.metadata`. What has arrived is
compared with the digests that stand in it. So a folder that has its name is whole, whatever ended meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from launch.launcher.copies import CHECKPOINTS, Parts, step_of
from launch.launcher.node_messages import CHUNK_BYTES, Ask, File, Part, digest_in
from rl.learner.changes import CHANGES
from rl.store.checkpoint_folder import steps_of, sync_folder
from rl.store.digests import DIGESTS, damage, file_digest, written_digests
from rl.wire.codec import ProtocolError

_WINDOW = 4
_AGAIN_S = 5.0
_ARRIVING = ".arriving"
_DROPPED = ".dropped"
TRIES = 3
"""What has failed so often, as a file that was changed since it was told, is no progress as far as it had come."""


def made_in(run: Path) -> dict[str, str]:
    """The folders of a run that others may want, with the digest of their digests."""
    names = [f"{CHECKPOINTS}{path.name}" for path in steps_of(run / CHECKPOINTS).values()]
    found = {}
    for name in (*names, "model", "adapter"):
        try:
            found[name] = file_digest(run / name / DIGESTS)
        except OSError:  # none, or just replaced
            continue
    return found


def known_changes(run: Path) -> bytes:
    """The whole lines of what was changed in the folder of a run."""
    path = run / CHANGES
    written = path.read_bytes() if path.exists() else b""
    return written[: written.rfind(b"\n") + 1]


class Opened:
    """A folder that is sent. Its files are open as long as it is there, so that they can be read to the end when their
    names are gone."""

    def __init__(self, run: Path, name: str) -> None:
        """Raises OSError: it is gone."""
        self.name = name
        self.files: dict[str, File] = {}
        self._open: dict[str, int] = {}
        digests = written_digests(run / name)
        for path, digest in (digests | {DIGESTS: file_digest(run / name / DIGESTS)}).items():
            self._open[f"{name}/{path}"] = descriptor = os.open(run / name / path, os.O_RDONLY)
            self.files[f"{name}/{path}"] = File(os.fstat(descriptor).st_size, digest)

    def __del__(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)

    @property
    def digest(self) -> str:
        """Of its digests."""
        return digest_in(self.name, self.files)

    def part(self, ask: Ask) -> Part:
        """Raises ProtocolError for what is no part of it."""
        if ask.file not in self._open or ask.offset < 0:
            raise ProtocolError(f"{ask.file!r} is no file that is sent now")
        return Part(ask.file, ask.offset, os.pread(self._open[ask.file], CHUNK_BYTES, ask.offset))


class Arriving:
    """A folder that is fetched. Raises ProtocolError where its files would lie elsewhere."""

    def __init__(self, run: Path, name: str, files: Mapping[str, File]) -> None:
        self.name = name
        self.digest = digest_in(name, files)
        self._target = run / name
        self.partial = _beside(self._target, _ARRIVING)
        self._naming = threading.Lock()
        self._is_wanted = True
        for file in files:
            below = PurePosixPath(file)
            if not file.startswith(f"{name}/") or ".." in below.parts or str(below) != file:
                raise ProtocolError(f"{file!r} is no file in {name}")
        self.parts = Parts({file: each.size for file, each in files.items()}, CHUNK_BYTES, _WINDOW, _AGAIN_S)
        self.partial.mkdir(parents=True)

    def write(self, part: Part) -> None:
        path = self.partial / part.file.removeprefix(f"{self.name}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(part.offset)
            file.write(part.data)

    def finish(self) -> bool:
        """Give it its name, in the place of what had it. False if it is not as its digests say, or was not wanted any
        more before it was done. Takes as long as reading all of it, and writing it to the disk."""
        if damage(self.partial, self.partial / DIGESTS) is not None:
            return False
        for path in self.partial.rglob("*"):
            sync_folder(path) if path.is_dir() else _sync(path)
        sync_folder(self.partial)

        before = _beside(self._target, _DROPPED)
        with self._naming:
            if not self._is_wanted:
                return False
            _rename(self._target, before)
            self.partial.rename(self._target)
        sync_folder(self._target.parent)
        shutil.rmtree(before, ignore_errors=True)
        return True

    def cancel(self) -> None:
        """From now on it gets no name."""
        with self._naming:
            self._is_wanted = False


class Fetcher:
    """Fetches one folder at a time, and drops others. What takes long, threads do beside the one that calls: it keeps
    leases alive, which last for seconds, and a checkpoint may have hundreds of gigabytes."""

    def __init__(self, run: Path, finish_s: float) -> None:
        """finish_s: what a folder may take to be compared with its digests and written to the disk."""
        self._run = run
        self._finish_s = finish_s
        self._arriving: Arriving | None = None
        self._failures: Counter[str] = Counter()  # by digest
        self._farthest: Counter[str] = Counter()  # parts that had come
        self._parts = 0  # of what is on its way
        self._taken = 0
        self._taken_at = 0.0

        self._finishes = ThreadPoolExecutor(1, "finishes")
        self._finishing: Future[bool] | None = None
        self._frees = ThreadPoolExecutor(1, "frees")
        self._freeing: Future[None] | None = None
        for left in self._left(_DROPPED):  # by a process that was killed
            self._free(left)

    @property
    def is_busy(self) -> bool:
        return self._arriving is not None

    @property
    def is_finishing(self) -> bool:
        """Whether all of it is here, and only its name is missing."""
        return self._arriving is not None and self._arriving.parts.done

    def brings(self, name: str, digest: str) -> bool:
        """Whether this very folder is on its way."""
        return self._arriving is not None and (self._arriving.name, self._arriving.digest) == (name, digest)

    def begin(self, name: str, files: Mapping[str, File]) -> None:
        """Raises ProtocolError. Only when it is not busy."""
        self.drop(self._left(_ARRIVING))
        self._arriving = Arriving(self._run, name, files)
        self._parts = 0

    def asks(self, now: float) -> list[Ask]:
        """What is to be asked for now; nothing before there is the room of what was dropped."""
        if self._arriving is None or (self._freeing is not None and not self._freeing.done()):
            return []
        return [Ask(*part) for part in self._arriving.parts.asks(now)]

    def take(self, part: Part, now: float) -> bool:
        """Whether it was waited for, as the one that comes next, and is written."""
        if self._arriving is None or not self._arriving.parts.take(part.file, part.offset, now):
            return False
        try:
            self._arriving.write(part)
        except OSError:
            self._fails(self._arriving)
            raise
        self._parts += 1
        if self._advances:
            self._taken += 1
            self._taken_at = now
        return True

    def came(self, now: float) -> float:
        """Another number whenever something has come. While all of a folder is here, and only its name is missing, time
        goes on in place of parts, for as long as that may take."""
        finishing = self.is_finishing and self._advances
        return self._taken + (min(now - self._taken_at, self._finish_s) if finishing else 0.0)

    @property
    def _advances(self) -> bool:
        if self._arriving is None:
            return False
        digest = self._arriving.digest
        return self._failures[digest] < TRIES or self._parts > self._farthest[digest]

    def _fails(self, arriving: Arriving) -> None:
        """Unlike what is cancelled, which may come as well as before."""
        self._failures[arriving.digest] += 1
        self._farthest[arriving.digest] = max(self._farthest[arriving.digest], self._parts)

    def ended(self) -> bool | None:
        """Once: whether the folder stands whole under its name. None while it does not, and afterwards. Raises OSError:
        a full disk."""
        if self._arriving is None or not self._arriving.parts.done:
            return None
        if self._finishing is None:
            self._finishing = self._finishes.submit(self._arriving.finish)
        if not self._finishing.done():
            return None

        finishing = self._finishing
        arriving = self._arriving
        self._finishing = self._arriving = None
        if finishing.exception() is not None or not finishing.result():
            self._fails(arriving)
            self.drop([arriving.partial])
        return finishing.result()

    def cancel(self) -> None:
        """What is on its way is not wanted any more. If it does not have its name by now, it never gets it."""
        if self._arriving is not None:
            self._arriving.cancel()
            self.drop([self._arriving.partial])
        self._finishing = self._arriving = None

    def drop(self, folders: Iterable[Path]) -> None:
        """They lose their names now, and are gone a while later."""
        for folder in folders:
            dropped = _beside(folder, _DROPPED)
            _rename(folder, dropped)
            self._free(dropped)

    def drop_checkpoints(self, names: Iterable[str]) -> None:
        """Those that are superfluous, of some folders of the run."""
        self.drop([self._run / name for name in names if step_of(name) >= 0])

    def forget_others(self, name: str) -> None:
        """No checkpoint but this one stays, and nothing that says what versions there were."""
        checkpoints = steps_of(self._run / CHECKPOINTS).values()
        self.drop([path for path in checkpoints if path.name != name.removeprefix(CHECKPOINTS)])
        (self._run / "versions.jsonl").unlink(missing_ok=True)

    def close(self) -> None:
        self.cancel()
        self._finishes.shutdown()
        self._frees.shutdown()

    def _free(self, dropped: Path) -> None:
        self._freeing = self._frees.submit(shutil.rmtree, dropped, ignore_errors=True)

    def _left(self, suffix: str) -> list[Path]:
        """Folders that never had their names, or have them no more."""
        parents = self._run, self._run / CHECKPOINTS
        return [path for parent in parents for path in parent.glob(f"*{suffix}") if path.is_dir()]


def _beside(folder: Path, suffix: str) -> Path:
    """A name that no other folder has or had."""
    return folder.with_name(f"{folder.name}.{secrets.token_hex(4)}{suffix}")


def _rename(folder: Path, name: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        folder.rename(name)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

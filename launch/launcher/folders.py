"""Folders that travel between the head and an agent, part by part: written beside their place, then under their name.

Both ends name a file by its folder and its path in it, as `checkpoints/step-40/state/.metadata`. What has arrived is
compared with the digests that stand in it. So a folder that has its name is whole, whatever ended meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path, PurePosixPath

from launch.launcher.copies import CHECKPOINTS, Parts, step_of
from launch.launcher.node_messages import CHUNK_BYTES, Ask, File, Part
from rl.learner.changes import CHANGES
from rl.store.checkpoint_folder import steps_of, sync_folder
from rl.store.digests import DIGESTS, damage, file_digest, written_digests
from rl.wire.codec import ProtocolError

_WINDOW = 4
_AGAIN_S = 5.0


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


def forget_others(run: Path, name: str) -> None:
    """No checkpoint but this one stays, and nothing that says what versions there were."""
    for path in steps_of(run / CHECKPOINTS).values():
        if path.name != name.removeprefix(CHECKPOINTS):
            shutil.rmtree(path)
    (run / "versions.jsonl").unlink(missing_ok=True)


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
        return self.files[f"{self.name}/{DIGESTS}"].digest

    def part(self, ask: Ask) -> Part:
        """Raises ProtocolError for what is no part of it."""
        if ask.file not in self._open or ask.offset < 0:
            raise ProtocolError(f"{ask.file!r} is no file that is sent now")
        return Part(ask.file, ask.offset, os.pread(self._open[ask.file], CHUNK_BYTES, ask.offset))


class Arriving:
    """A folder that is fetched. Raises ProtocolError where its files would lie elsewhere."""

    def __init__(self, run: Path, name: str, files: Mapping[str, File]) -> None:
        self.name = name
        self._target = run / name
        self.partial = self._target.with_name(f"{self._target.name}.arriving")
        for file in files:
            below = PurePosixPath(file)
            if not file.startswith(f"{name}/") or ".." in below.parts or str(below) != file:
                raise ProtocolError(f"{file!r} is no file in {name}")
        self.parts = Parts({file: each.size for file, each in files.items()}, CHUNK_BYTES, _WINDOW, _AGAIN_S)
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def write(self, part: Part) -> None:
        path = self.partial / part.file.removeprefix(f"{self.name}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if path.exists() else "wb") as file:
            file.seek(part.offset)
            file.write(part.data)

    def finish(self) -> bool:
        """Give it its name, in the place of what had it. False if it is not as its digests say: then it is gone. Takes
        as long as reading all of it, and writing it to the disk."""
        if damage(self.partial, self.partial / DIGESTS) is not None:
            shutil.rmtree(self.partial)
            return False

        for path in self.partial.rglob("*"):
            sync_folder(path) if path.is_dir() else _sync(path)
        sync_folder(self.partial)
        shutil.rmtree(self._target, ignore_errors=True)
        self.partial.rename(self._target)
        sync_folder(self._target.parent)
        return True


class Fetcher:
    """Fetches one folder at a time. What takes long, a thread does beside the one that calls."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._arriving: Arriving | None = None
        self._beside = ThreadPoolExecutor(1, "copies")
        self._finishing: Future[bool] | None = None

    @property
    def is_busy(self) -> bool:
        return self._arriving is not None

    @property
    def is_finishing(self) -> bool:
        """Whether all of it is here; to cancel it takes a while."""
        return self._arriving is not None and self._arriving.parts.done

    def begin(self, name: str, files: Mapping[str, File]) -> None:
        """Raises ProtocolError. Only when it is not busy."""
        self._arriving = Arriving(self._run, name, files)

    def asks(self, now: float) -> list[Ask]:
        """What is to be asked for now."""
        return [Ask(*part) for part in self._arriving.parts.asks(now)] if self._arriving is not None else []

    def take(self, part: Part, now: float) -> bool:
        """Whether it was waited for, as the one that comes next, and is written."""
        if self._arriving is None or not self._arriving.parts.take(part.file, part.offset, now):
            return False
        self._arriving.write(part)
        return True

    def ended(self) -> bool | None:
        """Once: whether the folder stands whole under its name. None while it does not, and afterwards. Raises OSError:
        a full disk."""
        if self._arriving is None or not self._arriving.parts.done:
            return None
        if self._finishing is None:
            self._finishing = self._beside.submit(self._arriving.finish)
        if not self._finishing.done():
            return None
        finishing, self._finishing, self._arriving = self._finishing, None, None
        return finishing.result()

    def cancel(self) -> None:
        """What is on its way is not wanted any more."""
        if self._finishing is not None:
            wait([self._finishing])
        elif self._arriving is not None:
            shutil.rmtree(self._arriving.partial, ignore_errors=True)
        self._finishing = self._arriving = None

    def close(self) -> None:
        self.cancel()
        self._beside.shutdown()


def drop(run: Path, names: list[str]) -> None:
    """Checkpoints that are superfluous."""
    for name in names:
        if step_of(name) >= 0:
            shutil.rmtree(run / name, ignore_errors=True)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())

"""Transport `shm`: all slots in one memory-mapped file, `/dev/shm/fresco-<run_id>-weights`, for the whole run.

    page 0   layout of the file, who holds the lock (for messages), size of the manifest
    then     the manifest, the slot table (`rl.weights.host.slots`) and the slots, each page-aligned

Rank 0 makes the file with all its pages allocated and mapped: writing into fresh pages is ten times slower. The file
gets its name when all is valid. Rank 0 unlinks it on close; its next incarnation adopts it. Nobody else unlinks it: the
file is opened and mapped directly, because `multiprocessing.shared_memory` lets the resource tracker of a dying reader
unlink it. What a killed run leaves is removed by `remove_slots` (its supervisor) or `sweep_stale` (the next run).

Who lives is told by locks, which the kernel frees when their holder dies: numbers of processes mean nothing in another
container. Each process that has the file open holds one byte of it, the owner another, each reader that of its row.
A file that is removed all the same is made again (`is_there`).

A large file takes minutes. It is made and mapped piece by piece, and who waits for it sees how far it is. Whoever
makes or adopts it holds as many bytes of the folder (`made_bytes`).

Decisions are taken under `flock` on the file, which the kernel frees when its holder dies.
Readers map the slots read-only, so no reader can damage weights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rl.config.schema import ConfigError
from rl.weights.host.ends import slot_geometry
from rl.weights.host.layout import Manifest
from rl.weights.host.slots import SlotTable
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile

FOLDER = Path("/dev/shm")
_MAGIC = 0x0005_6F63_7365_7266  # "fresco" and the layout's version
_PAGE = mmap.PAGESIZE
_PIECE = 64 << 20  # bytes that are made or mapped in one go: in much less than a second, also on a slow machine
_HEAD = np.dtype([(name, "<u8") for name in ("magic", "lock_pid", "manifest_bytes", "fetched_bytes")])
_LOCK_POLL_S = 0.0001
_LOCK_DEADLINE_S = 30.0  # critical sections take microseconds; only a stopped process holds longer
_DEAD_CHECK_S = 0.25
_BYTES = struct.Struct("hhqqi")  # C's `struct flock`
_OWNER, _OPEN, _FETCHES, _READERS = range(4)  # bytes that the living hold; of readers the first one
_PLACES = 1 << 21  # of makers, in the folder
_ROOM = 1 << 42  # bytes that a maker may hold, from its place on

Advance = Callable[[int], object]
"""Is told of so many bytes of a file, once they are made or mapped."""


def slots_path(run_id: str) -> Path:
    """Where the slots of a run are."""
    return FOLDER / f"fresco-{run_id}-weights"


def remove_slots(run_id: str) -> None:
    """Remove the files of a run whose processes have all ended."""
    for path in FOLDER.glob(f"fresco-{run_id}*-weights"):  # of all that share this memory
        path.unlink(missing_ok=True)


def _path_of(run: RunFile) -> Path:
    """Two machines may be two addresses of one box."""
    return slots_path(f"{run.run_id}-{run.host}" if run.config.channel == "tcp" else run.run_id)


@contextlib.contextmanager
def making() -> Iterator[bool]:
    """Whether this process may make a file now: one at a time on a machine, for each is large."""
    folder = os.open(FOLDER, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _try_flock(folder)
    finally:
        os.close(folder)


def _try_flock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def _telling(run: RunFile, advance: Advance) -> Iterator[Advance]:
    """An `advance` that others see as well (`made_bytes`), until the file is made, or this process dies."""
    folder = os.open(FOLDER, os.O_RDONLY | os.O_CLOEXEC)
    done = 0

    def tell(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        with contextlib.suppress(OSError):  # a hint alone, and some kernels of containers lock no folders
            _hold(folder, _place_of(run), done)
        advance(nbytes)

    try:
        yield tell
    finally:
        os.close(folder)


def made_bytes(run: RunFile) -> int:
    """How far another process is with the file that this run waits for, in bytes that it grows by; 0: nobody makes one.

    Of those who take turns it is the one whose turn it is (`making`), whatever its run.
    """
    folder = os.open(FOLDER, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _held(folder, _place_of(run), _ROOM)
    except OSError:
        return 0
    finally:
        os.close(folder)


def _place_of(run: RunFile) -> int:
    takes_turns = run.config.channel == "tcp"
    return _ROOM * (0 if takes_turns else 1 + zlib.crc32(_path_of(run).name.encode()) % (_PLACES - 1))


def _hold(descriptor: int, byte: int, count: int = 1) -> None:
    """Hold bytes of the file, beside others who do, until the descriptor is closed."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _BYTES.pack(fcntl.F_RDLCK, os.SEEK_SET, byte, count, 0))


def _held(descriptor: int, byte: int = 0, count: int = 0) -> int:
    """How many bytes somebody holds through another descriptor, some of these among them; 0 bytes: of all."""
    wanted = _BYTES.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, count, 0)
    kind, _, _, held, _ = _BYTES.unpack(fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, wanted))
    return 0 if kind == fcntl.F_UNLCK else int(held)


def check_space(manifest_bytes: int, slots: int) -> None:
    """Raises ConfigError unless `/dev/shm` has room for so many slots of so many bytes."""
    needed = slots * _pages(manifest_bytes) + (1 << 20)
    try:
        with tempfile.TemporaryFile(dir=FOLDER):
            available = _available_bytes()
    except OSError as error:
        unusable = f"{FOLDER} cannot be used ({error.strerror})"
        raise ConfigError(f"weights.transport='shm': {unusable}; set weights.transport=zmq") from None
    if needed > available:
        raise _no_space(needed, available, slots)


def sweep_stale() -> list[Path]:
    """Remove the files that no living process has open; what was removed."""
    removed = []
    for path in FOLDER.glob("fresco-*-weights"):
        with contextlib.suppress(OSError):  # ended meanwhile; another user's; of a file system that cannot be written
            with path.open("rb") as file:
                is_stale = not _held(file.fileno())
            if is_stale:
                path.unlink()
                removed.append(path)
    return removed


def _read_head(descriptor: int) -> np.void | None:
    """The head of the file; None if it has none."""
    raw = os.pread(descriptor, _HEAD.itemsize, 0)
    return np.frombuffer(raw, _HEAD, 1)[0] if len(raw) == _HEAD.itemsize else None


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of each."""
    return ((at, min(_PIECE, nbytes - at)) for at in range(0, nbytes, _PIECE))


def _map_pages(data: np.ndarray) -> None:
    """All of them now, for whoever meets a fresh one later takes ten times as long.

    MAP_POPULATE would do as well, but Python keeps its lock within `mmap`. 183 GiB take two minutes, and no thread of
    the process could say meanwhile that it lives. numpy lets go of the lock.
    """
    data[::_PAGE].max()


def _available_bytes() -> int:
    stat = os.statvfs(FOLDER)
    return stat.f_bavail * stat.f_frsize


def _no_space(needed: int, available: int, slots: int) -> ConfigError:
    return ConfigError(
        f"{FOLDER} has {available / 1e9:.2f} GB free, {slots} weight slots need {needed / 1e9:.2f} GB: enlarge it "
        f"(docker run --shm-size={needed * 11 // 10 >> 20}m), set weights.slots=2, or weights.transport=zmq"
    )


class SlotsFile:
    """The file as one process sees it: `rl.weights.host.ends.Slots`."""

    def __init__(
        self, descriptor: int, run: RunFile, manifest: Manifest, *, writable: bool, advance: Advance = int
    ) -> None:
        self.manifest = manifest
        self._descriptor = descriptor
        self._threads = threading.Lock()  # flock excludes processes, not threads on one descriptor
        self._next_dead_check = 0.0
        self._row = -1  # its reader's
        _hold(descriptor, _OPEN)

        geometry = slot_geometry(run, manifest)
        table_at, slots_at, size = _offsets(run, manifest)
        self._slot_pages = _pages(manifest.total_bytes)
        control = mmap.mmap(descriptor, slots_at, flags=mmap.MAP_SHARED)
        self.head = np.frombuffer(control, _HEAD, 1)
        self.table = SlotTable(memoryview(control)[table_at:], geometry, manifest.spans())
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._data = mmap.mmap(descriptor, size - slots_at, flags=mmap.MAP_SHARED, prot=protection, offset=slots_at)
        whole = np.frombuffer(self._data, np.uint8)
        for at, length in _pieces(len(whole)):
            _map_pages(whole[at : at + length])
            advance(length)

    @classmethod
    def create(
        cls, run: RunFile, manifest: Manifest, published: SlotsFile | None = None, advance: Advance = int
    ) -> SlotsFile:
        """Make the file, as its owner, with what another one has `published`. Raises ConfigError where there is no room
        for it."""
        with _telling(run, advance) as tell:
            return cls._create(run, manifest, published, tell)

    @classmethod
    def _create(cls, run: RunFile, manifest: Manifest, published: SlotsFile | None, advance: Advance) -> SlotsFile:
        descriptor = os.open(FOLDER, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)  # without a name until it is whole
        *_, size = _offsets(run, manifest)
        try:
            for at, length in _pieces(size):
                os.posix_fallocate(descriptor, at, length)  # a later SIGBUS becomes an error here
                advance(length)
        except OSError as error:
            os.close(descriptor)  # with it goes what it has
            if error.errno != errno.ENOSPC:
                raise
            raise _no_space(size, _available_bytes(), run.config.weights.slots) from None

        encoded = manifest.encode()
        os.pwrite(descriptor, encoded, _PAGE)
        made = cls(descriptor, run, manifest, writable=True, advance=advance)
        made.head["magic"] = _MAGIC
        made.head["manifest_bytes"] = len(encoded)
        made.table.clear()
        if published is not None:
            made.table.take_over(published.table)
            data = np.frombuffer(published._data, np.uint8)
            for at, length in _pieces(len(data)):
                np.frombuffer(made._data, np.uint8)[at : at + length] = data[at : at + length]
                advance(length)

        _hold(descriptor, _OWNER)
        path = _path_of(run)
        path.unlink(missing_ok=True)
        # With a folder's descriptor, which it does not need, Python's `link` follows the link in /proc.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)
        return made

    @classmethod
    def adopt(cls, run: RunFile, manifest: Manifest) -> SlotsFile | None:
        """The file of an owner that died, with all that was published, for a new owner; None if it is not whole."""
        with _telling(run, int) as tell:
            found = cls.attach(run, writable=True, owned=False, advance=tell)
        if found is None:
            return None
        if found.manifest != manifest:
            found.close()
            return None
        with found.lock() as table:
            table.give_up_drafts()
        _hold(found._descriptor, _OWNER)
        return found

    @classmethod
    def attach(cls, run: RunFile, *, writable: bool, owned: bool = True, advance: Advance = int) -> SlotsFile | None:
        """The file, if there is one and (`owned`) its owner lives."""
        path = _path_of(run)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        head = _read_head(descriptor)
        if head is None or head["magic"] != _MAGIC or (owned and not _held(descriptor, _OWNER, 1)):
            os.close(descriptor)
            return None
        encoded = os.pread(descriptor, int(head["manifest_bytes"]), _PAGE)
        return cls(descriptor, run, Manifest.decode(encoded), writable=writable, advance=advance)

    @property
    def is_there(self) -> bool:
        """Whether the file still has its name, so that others find it."""
        return os.fstat(self._descriptor).st_nlink > 0

    def register(self, name: str, incarnation: int) -> int:
        """The row of this process's reader, which counts as alive as long as the file is open here."""
        with self.lock() as table:
            self._row = table.register(name, incarnation)
        _hold(self._descriptor, _READERS + self._row)
        return self._row

    def begin_fetch(self) -> bool:
        """Whether this process is the one of its machine that fetches, until `end_fetch` or its death."""
        wanted = _BYTES.pack(fcntl.F_WRLCK, os.SEEK_SET, _FETCHES, 1, 0)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, wanted)
        except BlockingIOError:
            return False
        return True

    def end_fetch(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _BYTES.pack(fcntl.F_UNLCK, os.SEEK_SET, _FETCHES, 1, 0))

    def view(self, slot: int) -> memoryview:
        begin = slot * self._slot_pages
        return memoryview(self._data)[begin : begin + self.manifest.total_bytes]

    @contextlib.contextmanager
    def lock(self) -> Iterator[SlotTable]:
        """The table, to this process and thread alone. Raises WaitExpired naming a stopped process that has it."""
        with self._threads:
            until = time.monotonic() + _LOCK_DEADLINE_S
            while not _try_flock(self._descriptor):
                if time.monotonic() > until:
                    holder = int(self.head["lock_pid"][0])
                    raise WaitExpired(f"the lock of the weight slots is held by stopped process {holder}")
                time.sleep(_LOCK_POLL_S)
            self.head["lock_pid"] = os.getpid()
            try:
                yield self.table
            finally:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def end_dead(self) -> None:
        """End the leases of dead processes, at most every quarter of a second."""
        if time.monotonic() >= self._next_dead_check:
            self._next_dead_check = time.monotonic() + _DEAD_CHECK_S
            with self.lock() as table:
                table.end_dead(self._lives)

    def _lives(self, row: int) -> bool:
        return row == self._row or _held(self._descriptor, _READERS + row, 1) > 0

    def close(self) -> None:
        # The mappings go when the last view of them does: an engine may still hold tensors on a slot.
        os.close(self._descriptor)
        del self.head, self.table, self._data


def _offsets(run: RunFile, manifest: Manifest) -> tuple[int, int, int]:
    """Where the table and the slots begin, and where the file ends."""
    geometry = slot_geometry(run, manifest)
    table_at = _PAGE + _pages(len(manifest.encode()))
    slots_at = table_at + _pages(geometry.nbytes)
    return table_at, slots_at, slots_at + max(_PAGE, geometry.slots * _pages(manifest.total_bytes))

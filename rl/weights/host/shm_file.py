"""Transport `shm`: all slots in one memory-mapped file, `/dev/shm/fresco-<run_id>-weights`, for the whole run.

    page 0   owner and supervisor (pid, start time), lock holder, size of the manifest; magic last, once all is valid
    then     the manifest, the slot table (`rl.weights.host.slots`) and the slots, each page-aligned

Rank 0 makes the file with all its pages allocated and mapped (writing into fresh pages is ten times slower), and
unlinks it on close; its next incarnation adopts it. Nobody else unlinks it: the file is opened and mapped directly,
because `multiprocessing.shared_memory` lets the resource tracker of a dying reader unlink it. What a killed run leaves
is removed by `remove_slots` (its supervisor) or `sweep_stale` (the next run).

Decisions are taken under `flock` on the file, which the kernel frees when its holder dies.
Readers map the slots read-only, so no reader can damage weights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rl.config.schema import ConfigError
from rl.weights.host.ends import slot_geometry
from rl.weights.host.layout import Manifest
from rl.weights.host.slots import SlotTable
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile

FOLDER = Path("/dev/shm")
_MAGIC = 0x0003_6F63_7365_7266  # "fresco" and the layout's version
_PAGE = mmap.PAGESIZE
_FIELDS = ("magic", "owner_pid", "owner_started", "lock_pid", "manifest_bytes", "run_pid", "run_started")
_HEAD = np.dtype([(name, "<u8") for name in _FIELDS])
_LOCK_POLL_S = 0.0001
_LOCK_DEADLINE_S = 30.0  # critical sections take microseconds; only a stopped process holds longer
_DEAD_CHECK_S = 0.25
_UNFINISHED_S = 60.0  # a file without an owner is being made, unless it is older than this


def slots_path(run_id: str) -> Path:
    """Where the slots of a run are."""
    return FOLDER / f"fresco-{run_id}-weights"


def remove_slots(run_id: str) -> None:
    """Remove the file of a run whose processes have all ended."""
    path = slots_path(run_id)
    if path.exists():  # asked first: on a file system that cannot be written, even what is not there cannot be removed
        path.unlink(missing_ok=True)


def process_started(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot (with the pid: unique); None if dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _alive(pid: int, started: int) -> bool:
    return process_started(pid) == started


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
    """Remove the files of runs that are dead; what was removed. A learner that died may be about to come back."""
    removed = []
    for path in FOLDER.glob("fresco-*-weights"):
        with contextlib.suppress(OSError):  # ended meanwhile; another user's; of a file system that cannot be written
            with path.open("rb") as file:
                head = _read_head(file.fileno())
            unfinished = head is None and time.time() - path.stat().st_mtime > _UNFINISHED_S
            if unfinished or (head is not None and not _owned(head) and not _owned(head, "run")):
                path.unlink()
                removed.append(path)
    return removed


def _read_head(descriptor: int) -> np.void | None:
    """The head of the file; None if it has none yet."""
    raw = os.pread(descriptor, _HEAD.itemsize, 0)
    return np.frombuffer(raw, _HEAD, 1)[0] if len(raw) == _HEAD.itemsize else None


def _own(head: np.ndarray) -> None:
    """This process is the owner, in the run of its supervisor."""
    pids = {"owner": os.getpid(), "run": int(os.environ.get("FRESCO_PARENT_PID", os.getpid()))}
    for name, pid in pids.items():
        head[f"{name}_pid"] = pid
        head[f"{name}_started"] = process_started(pid) or 0


def _owned(head: np.void, name: str = "owner") -> bool:
    """Whether the process that made the file, or its supervisor (`run`), lives."""
    return _alive(int(head[f"{name}_pid"]), int(head[f"{name}_started"]))


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


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

    def __init__(self, descriptor: int, run: RunFile, manifest: Manifest, *, writable: bool) -> None:
        self.manifest = manifest
        self._descriptor = descriptor
        self._threads = threading.Lock()  # flock excludes processes, not threads on one descriptor
        self._next_dead_check = 0.0

        geometry = slot_geometry(run, manifest)
        table_at, slots_at, size = _offsets(run, manifest)
        self._slot_pages = _pages(manifest.total_bytes)
        shared = mmap.MAP_SHARED | mmap.MAP_POPULATE
        control = mmap.mmap(descriptor, slots_at, flags=shared)
        self.head = np.frombuffer(control, _HEAD, 1)
        self.table = SlotTable(memoryview(control)[table_at:], geometry, manifest.spans())
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._data = mmap.mmap(descriptor, size - slots_at, flags=shared, prot=protection, offset=slots_at)

    @classmethod
    def create(cls, run: RunFile, manifest: Manifest) -> SlotsFile:
        """Make the file, as its owner. Raises ConfigError where there is no room for it."""
        path = slots_path(run.run_id)
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        encoded = manifest.encode()
        head = np.zeros(1, _HEAD)
        _own(head)
        head["manifest_bytes"] = len(encoded)
        os.write(descriptor, head.tobytes())  # from here on `sweep_stale` knows whose it is

        *_, size = _offsets(run, manifest)
        try:
            os.posix_fallocate(descriptor, 0, size)  # a later SIGBUS becomes an error here
        except OSError as error:
            available = _available_bytes()
            path.unlink()
            os.close(descriptor)
            if error.errno != errno.ENOSPC:
                raise
            raise _no_space(size, available, run.config.weights.slots) from None

        os.pwrite(descriptor, encoded, _PAGE)
        made = cls(descriptor, run, manifest, writable=True)
        made.table.clear()
        made.head["magic"] = _MAGIC
        return made

    @classmethod
    def adopt(cls, run: RunFile, manifest: Manifest) -> SlotsFile | None:
        """The file of an owner that died, with all that was published, for a new owner; None if it is not whole."""
        found = cls.attach(run, writable=True, owned=False)
        if found is None or found.manifest != manifest:
            return None
        with found.lock() as table:
            table.give_up_drafts()
        _own(found.head)
        return found

    @classmethod
    def attach(cls, run: RunFile, *, writable: bool, owned: bool = True) -> SlotsFile | None:
        """The file, if it has been finished and (`owned`) its owner lives."""
        path = slots_path(run.run_id)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        head = _read_head(descriptor)
        if head is None or head["magic"] != _MAGIC or (owned and not _owned(head)):
            os.close(descriptor)
            return None
        encoded = os.pread(descriptor, int(head["manifest_bytes"]), _PAGE)
        return cls(descriptor, run, Manifest.decode(encoded), writable=writable)

    def view(self, slot: int) -> memoryview:
        begin = slot * self._slot_pages
        return memoryview(self._data)[begin : begin + self.manifest.total_bytes]

    @contextlib.contextmanager
    def lock(self) -> Iterator[SlotTable]:
        """The table, to this process and thread alone. Raises WaitExpired naming a stopped process that has it."""
        with self._threads:
            until = time.monotonic() + _LOCK_DEADLINE_S
            while not self._try_lock():
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
                table.end_dead(_alive)

    def close(self) -> None:
        # The mappings go when the last view of them does: an engine may still hold tensors on a slot.
        os.close(self._descriptor)
        del self.head, self.table, self._data

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def _offsets(run: RunFile, manifest: Manifest) -> tuple[int, int, int]:
    """Where the table and the slots begin, and where the file ends."""
    geometry = slot_geometry(run, manifest)
    table_at = _PAGE + _pages(len(manifest.encode()))
    slots_at = table_at + _pages(geometry.nbytes)
    return table_at, slots_at, slots_at + max(_PAGE, geometry.slots * _pages(manifest.total_bytes))

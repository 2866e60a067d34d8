"""Transport `shm`: all slots in one memory-mapped file, `/dev/shm/fresco-<run_id>-weights`, for the whole run.

    page 0   owner (pid, start time), sizes, lock holder; magic last, once the rest is valid
    then     the slot table (`rl.weights.slots`)
    then     the slots, each page-aligned

Rank 0 makes the file with all its pages allocated and mapped (writing into fresh pages is ten times
slower), and unlinks it on close. Nobody else unlinks it: the file is opened and mapped directly, because
`multiprocessing.shared_memory` lets the resource tracker of a dying reader unlink it. What a killed run
leaves is removed by `unlink_segments` (its supervisor) or `sweep_stale` (the next run).

Decisions are taken under `flock` on the file, which the kernel frees when its holder dies.
Readers map the slots read-only, so no reader can damage weights.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rl.core.config import ConfigError
from rl.core.process import WaitExpired
from rl.core.run import RunFile
from rl.weights.base import Manifest, WeightsError
from rl.weights.slots import Geometry, SlotTable

FOLDER = Path("/dev/shm")
_MAGIC = 0x0001_6F63_7365_7266  # "fresco" and the layout's version
_PAGE = mmap.PAGESIZE
_LOCK_POLL_S = 0.0001
_LOCK_DEADLINE_S = 30.0  # critical sections take microseconds; only a stopped process holds longer
_HEAD = np.dtype(
    [
        ("magic", "<u8"), ("owner_pid", "<u8"), ("owner_started", "<u8"), ("lock_pid", "<u8"),
        ("slots", "<u8"), ("ranks", "<u8"), ("segments", "<u8"), ("slot_bytes", "<u8"), ("fingerprint", "<u8"),
    ]
)  # fmt: skip
_UNFINISHED_S = 60.0  # a file without an owner is being made, unless it is older than this


def segment_path(run_id: str) -> Path:
    return FOLDER / f"fresco-{run_id}-weights"


def process_started(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot (with the pid: unique); None if dead or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def alive(pid: int, started: int) -> bool:
    return process_started(pid) == started


def check_space(manifest_bytes: int, slots: int) -> None:
    """Raises ConfigError unless `/dev/shm` has room for the slots."""
    needed = slots * _pages(manifest_bytes) + (1 << 20)
    stat = os.statvfs(FOLDER)
    available = stat.f_bavail * stat.f_frsize
    if needed > available:
        raise ConfigError(_no_space(needed, available, slots))


def sweep_stale() -> list[Path]:
    """Remove segments whose owner is dead; what was removed."""
    removed = []
    for path in FOLDER.glob("fresco-*-weights"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # ended meanwhile; another user's
            head = path.read_bytes() if path.stat().st_size < _PAGE else _read_head(path)
            if len(head) < _HEAD.itemsize:
                stale = time.time() - path.stat().st_mtime > _UNFINISHED_S
            else:
                owner = np.frombuffer(head, _HEAD, 1)[0]
                stale = not alive(int(owner["owner_pid"]), int(owner["owner_started"]))
            if stale:
                path.unlink()
                removed.append(path)
    return removed


def unlink_segments(run_id: str) -> None:
    """Remove the segment of a run whose processes have all ended."""
    segment_path(run_id).unlink(missing_ok=True)


def _read_head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD.itemsize)


def _pages(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE


def _no_space(needed: int, available: int, slots: int) -> str:
    return (
        f"{FOLDER} has {available / 1e9:.2f} GB free, {slots} weight slots need {needed / 1e9:.2f} GB: "
        f"enlarge it (docker run --shm-size={needed * 11 // 10 >> 20}m), set weights.slots=2, or weights.transport=zmq"
    )


class Mapped:
    """The file as one process sees it."""

    def __init__(self, descriptor: int, geometry: Geometry, manifest: Manifest, *, writable: bool) -> None:
        self.descriptor, self.manifest = descriptor, manifest
        self._threads = threading.Lock()  # flock excludes processes, not threads on one descriptor
        self._slot_pages = _pages(manifest.total_bytes)
        table_bytes = _pages(_PAGE + geometry.nbytes)
        self._control = mmap.mmap(descriptor, table_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self.head = np.frombuffer(self._control, _HEAD, 1)
        self.table = SlotTable(memoryview(self._control)[_PAGE:], geometry, manifest.spans())
        self._data = mmap.mmap(
            descriptor, max(_PAGE, geometry.slots * self._slot_pages), offset=table_bytes,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
        )  # fmt: skip

    def slot(self, index: int) -> memoryview:
        begin = index * self._slot_pages
        return memoryview(self._data)[begin : begin + self.manifest.total_bytes]

    @contextlib.contextmanager
    def lock(self) -> Iterator[SlotTable]:
        with self._threads, self._flock():
            yield self.table

    @contextlib.contextmanager
    def _flock(self) -> Iterator[None]:
        until = time.monotonic() + _LOCK_DEADLINE_S
        while True:
            try:
                fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    holder = int(self.head["lock_pid"][0])
                    raise WaitExpired(f"the lock of the weight slots is held by stopped process {holder}") from None
                time.sleep(_LOCK_POLL_S)
        self.head["lock_pid"] = os.getpid()
        try:
            yield
        finally:
            fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        # The mappings go when the last view of them does: an engine may still hold tensors on a slot.
        os.close(self.descriptor)
        del self.head, self.table, self._control, self._data


def _geometry(run: RunFile, manifest: Manifest) -> Geometry:
    # A rank writes one range per tensor; the reserve is for writers that split large ones.
    return Geometry(run.config.weights.slots, run.config.learner.ranks, len(manifest.tensors) + 64)


def create(run: RunFile, manifest: Manifest) -> Mapped:
    path, geometry = segment_path(run.run_id), _geometry(run, manifest)
    size = _pages(_PAGE + geometry.nbytes) + max(_PAGE, geometry.slots * _pages(manifest.total_bytes))
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    head = np.zeros(1, _HEAD)
    head["owner_pid"], head["owner_started"] = os.getpid(), process_started(os.getpid())
    os.write(descriptor, head.tobytes())  # from here on `sweep_stale` knows whose it is
    try:
        os.posix_fallocate(descriptor, 0, size)  # a later SIGBUS becomes an error here
    except OSError as error:
        stat = os.statvfs(FOLDER)
        path.unlink()
        os.close(descriptor)
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(_no_space(size, stat.f_bavail * stat.f_frsize, geometry.slots)) from None
    mapped = Mapped(descriptor, geometry, manifest, writable=True)
    mapped.table.clear()
    for name in ("slots", "ranks", "segments"):
        mapped.head[name] = getattr(geometry, name)
    mapped.head["slot_bytes"], mapped.head["fingerprint"] = manifest.total_bytes, manifest.fingerprint()
    mapped.head["magic"] = _MAGIC
    return mapped


def attach(run: RunFile, manifest: Manifest, *, writable: bool) -> Mapped | None:
    """The segment, if its owner lives and has finished making it."""
    try:
        descriptor = os.open(segment_path(run.run_id), os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    raw = os.pread(descriptor, _HEAD.itemsize, 0)
    head = np.frombuffer(raw, _HEAD, 1)[0] if len(raw) == _HEAD.itemsize else np.zeros((), _HEAD)[()]
    if head["magic"] != _MAGIC or not alive(int(head["owner_pid"]), int(head["owner_started"])):
        os.close(descriptor)
        return None
    if head["fingerprint"] != manifest.fingerprint():
        os.close(descriptor)
        raise WeightsError(
            f"the weight slots of run {run.run_id} have another layout ({head['slot_bytes']} bytes a version) "
            f"than this process ({manifest.total_bytes}): all ranks must export the same tensors"
        )
    geometry = Geometry(int(head["slots"]), int(head["ranks"]), int(head["segments"]))
    return Mapped(descriptor, geometry, manifest, writable=writable)

"""Sandboxes from bubblewrap and overlayfs: no image, no daemon, about 10 ms for a command.

    slot = uid + memory tree + folder        create:  sized tmpfs → overlay(template, upper)
                                             run:     sh → prlimit → setpriv (uid) → bwrap → command
                                             close:   kill, drop the mounts

Mounts are made by threads in namespaces of their own. The backend's holds the runtime and the templates; each slot's is
a copy of it with the slot's two mounts. So a command pays for its own mounts only. They are invisible to the host and
end with this process, however it ends. Commands die with it too (PR_SET_PDEATHSIG at each step of the chain). Root does
this, not a user namespace: it mounts the overlay, then gives up everything *before* bubblewrap starts. So what
bubblewrap maps in is readable to the slot's uid only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from envs.sandbox import memory, syscalls
from envs.sandbox.base import WORKSPACE, Command, Limits, Result, Sandbox, SandboxError, Template, last_line
from envs.sandbox.process import run_command
from envs.sandbox.runtime import HOME, UID, build_root, default_runtime
from rl.wire.process import adopt_orphans

STATE = Path("/run/fresco-sandbox")
"""Where the root folder, the templates and the slots are mounted, unseen by the host."""
_FIRST_UID = 1_879_048_192
"""The first user id, far above what systems and containers hand out."""
_UIDS_PER_PROCESS = 4096
_PROCESSES = 64
_SLOT_DEADLINE_S = 600.0
_INODES = 100_000
T = TypeVar("T")


class BubblewrapBackend:
    """`slots`: sandboxes alive at once; `threads`: commands running at once."""

    name = "bubblewrap"

    def __init__(self, slots: int = 64, threads: int = 8, *, control_groups: bool = True) -> None:
        if not 1 <= slots <= _UIDS_PER_PROCESS:
            raise SandboxError(f"slots={slots}: must be 1 to {_UIDS_PER_PROCESS}")

        self.runtime = default_runtime()
        self._lock, self._uid_base = _claim_uids()
        self._controller = memory.memory_controller() if control_groups else None
        if self._controller:
            memory.sweep_groups(self._controller[0])

        self._trees: dict[int, memory.ProcessTree] = {}
        self._templates: dict[Path, Path] = {}
        self._template_lock = threading.Lock()
        self._live: set[BubblewrapSandbox] = set()
        self._closed = False
        # The last slot given back is taken first: its control group is made already.
        self._free_slots: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in reversed(range(slots)):
            self._free_slots.put(slot)

        # The inner process of bwrap outlives the outer one by a moment. Never taken back: others may count on it.
        adopt_orphans()
        STATE.mkdir(mode=0o711, parents=True, exist_ok=True)
        with ThreadPoolExecutor(1, "sandbox-mounts") as first:
            self._namespace = first.submit(self._build).result()
        self._pool = ThreadPoolExecutor(
            threads, "sandbox", initializer=syscalls.join_mount_namespace, initargs=(self._namespace,)
        )

    def open(self, template: Template, limits: Limits) -> Sandbox:
        """Blocks while every slot is taken. Raises SandboxError for an image, a missing folder or past the deadline."""
        folder = template.folder
        if folder is None:
            raise SandboxError(f"image {template.image!r} needs the docker backend; bubblewrap takes a folder")
        try:
            slot = self._free_slots.get(timeout=_SLOT_DEADLINE_S)
        except queue.Empty:
            raise SandboxError(f"no sandbox slot became free within {_SLOT_DEADLINE_S:.0f} s") from None

        try:
            sandbox = self.run_in_thread(lambda: BubblewrapSandbox(self, slot, folder, limits, template.visible))
        except BaseException:
            self._free_slots.put(slot)
            raise
        self._live.add(sandbox)
        return sandbox

    def close(self) -> None:
        if self._closed:
            return
        for sandbox in list(self._live):
            sandbox.close()

        self._closed = True
        self._pool.shutdown()
        for tree in self._trees.values():
            tree.remove()
        # This descriptor is the last user of the mounts: they end here.
        os.close(self._namespace)
        os.close(self._lock)

    def run_in_thread(self, work: Callable[[], T]) -> T:
        """Do `work` in a thread that sees the mounts. Raises SandboxError for the host's errors."""
        if self._closed:
            raise SandboxError("the sandbox backend is closed")
        try:
            return self._pool.submit(work).result()
        except OSError as error:
            raise SandboxError(f"the host refused a sandbox operation: {error}") from error

    @contextlib.contextmanager
    def returning(self) -> Iterator[None]:
        """Bring the calling thread back to the backend's mounts at the end."""
        try:
            yield
        finally:
            syscalls.join_mount_namespace(self._namespace)

    @contextlib.contextmanager
    def inside(self, namespace: int) -> Iterator[None]:
        """The calling thread sees the mounts of a slot, as do the processes that it starts."""
        with self.returning():
            syscalls.join_mount_namespace(namespace)
            yield

    def uid(self, slot: int) -> int:
        return self._uid_base + slot

    def tree(self, slot: int) -> memory.ProcessTree:
        if slot not in self._trees:
            if self._controller:
                folder, version = self._controller
                self._trees[slot] = memory.ControlGroup(folder / f"fresco-{os.getpid()}-{self.uid(slot)}", version)
            else:
                self._trees[slot] = memory.Watchdog(self.uid(slot))
        return self._trees[slot]

    def lower(self, folder: Path) -> Path:
        """A read-only mount of a template, under a name free of the characters that overlay options reserve."""
        with self._template_lock:
            folder = folder.resolve()
            if folder not in self._templates:
                if not folder.is_dir():
                    raise SandboxError(f"template {folder} is no folder")
                target = STATE / "templates" / str(len(self._templates))
                target.mkdir(parents=True)
                syscalls.bind(folder, target, read_only=True)
                self._templates[folder] = target
            return self._templates[folder]

    def show(self, folder: Path) -> tuple[Path, Path]:
        """(mount, path inside) of a folder that sandboxes see at its own path; what the runtime has there stays."""
        inside = folder.absolute()
        target = STATE / "root" / str(inside).lstrip("/")
        target.mkdir(mode=0o755, parents=True, exist_ok=True)
        return self.lower(folder), inside

    def released(self, sandbox: BubblewrapSandbox, slot: int) -> None:
        self._live.discard(sandbox)
        self._free_slots.put(slot)

    def _build(self) -> int:
        namespace = syscalls.enter_new_mount_namespace()
        syscalls.mount("tmpfs", STATE, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, "mode=0711")
        root = STATE / "root"
        root.mkdir(mode=0o755)
        for source, target in build_root(self.runtime, root):
            syscalls.bind(source, target, read_only=True)
        return namespace


class BubblewrapSandbox:
    """A sandbox that is made and used through the backend's threads."""

    def __init__(
        self, backend: BubblewrapBackend, slot: int, template: Path, limits: Limits, visible: Sequence[Path] = ()
    ) -> None:
        self.limits = limits
        self._backend = backend
        self._slot = slot
        self._uid = backend.uid(slot)
        self._tree = backend.tree(slot)
        self._tree.set_limits(limits)
        self._folder = STATE / f"slot-{slot}"
        self._namespace = -1
        self._lock = threading.Lock()
        self._open = True
        self._ending = False

        lower = backend.lower(template)
        self._visible = [backend.show(folder) for folder in visible]
        try:
            with backend.returning():
                self._namespace = self._mount(lower)
        except BaseException:
            self._drop()
            raise

    def run(self, command: Command) -> Result:
        with self._lock:
            if not self._open or self._ending:
                raise SandboxError("this sandbox is closed")
            return self._backend.run_in_thread(lambda: self._run(command))

    def kill(self) -> None:
        """To be called from any thread: end what runs, and let nothing begin any more."""
        self._ending = True
        memory.kill_tree(self._tree)

    def close(self) -> None:
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._backend.run_in_thread(self._drop)
            self._backend.released(self, self._slot)

    def _run(self, command: Command) -> Result:
        watched = self._tree.watched
        syscalls.reap_orphans(self._uid)

        status = os.memfd_create("status")
        with os.fdopen(status, "rb") as told, self._backend.inside(self._namespace):
            # An earlier command may have locked these folders.
            for name in ("merged", "disk/tmp", "disk/home", "disk/shm"):
                (self._folder / name).chmod(0o755)
            if command.run_folder is not None:
                # Mounted here, because the folders above it may be closed to the slot's uid.
                (self._folder / "run").mkdir(exist_ok=True)
                syscalls.bind(command.run_folder, self._folder / "run", read_only=True)

            result = run_command(
                self._wrapped(command, status),
                command.stdin,
                command.deadline_s(self.limits),
                self.limits.output_bytes,
                separate_stderr=command.separate_stderr,
                environment={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
                kill=lambda: memory.kill_tree(self._tree),
                exceeded=self._tree.exceeded if watched else None,
                status=status,
            )

            told.seek(0)
            began = b"exit-code" in told.read()

        if not watched and self._tree.exceeded():
            result = replace(result, out_of_memory=True)
        if not began and not result.timed_out and not result.out_of_memory:
            why = last_line(result.stderr if command.separate_stderr else result.output)
            raise SandboxError(f"a command of a sandbox did not start: {why}")
        return result

    def _wrapped(self, command: Command, status: int) -> list[str]:
        """The command behind the tools that limit it, drop root and enter its namespaces."""
        limits = self.limits
        uid = self._uid
        cpu = f"--cpu={limits.cpu_s}" if limits.cpu_s else ""

        chain = f"""
            prlimit --nproc={limits.processes} --fsize={limits.file_bytes} --nofile={limits.open_files}
                --core=0 --memlock=65536 --rttime=1000000 {cpu}
            setpriv --reuid={uid} --regid={uid} --clear-groups --pdeathsig=KILL
            bwrap --json-status-fd {status} --unshare-all --unshare-user --disable-userns --die-with-parent
                --new-session --cap-drop ALL --clearenv --uid {UID} --gid {UID} --hostname sandbox
                --ro-bind {STATE}/root / --proc /proc --dev /dev
                --bind {self._folder}/disk/shm /dev/shm --remount-ro /dev
                --bind {self._folder}/disk/tmp /tmp --bind {self._folder}/disk/home {HOME}
                --bind {self._folder}/merged {WORKSPACE} --chdir {WORKSPACE}
        """.split()

        chain += self._read_only(command.read_only)
        for source, inside in self._visible:
            chain += ["--ro-bind", str(source), str(inside)]
        if command.run_folder is not None:
            chain += ["--ro-bind", f"{self._folder}/run", "/run"]
        for name, value in (self._backend.runtime.environment() | dict(command.environment)).items():
            chain += ["--setenv", name, value]
        return [*self._tree.command_prefix(), *chain, "--", *command.argv]

    def _read_only(self, files: Sequence[str]) -> list[str]:
        """A mount of each file and of each folder above it: what is mounted upon cannot be renamed or removed."""
        merged = self._folder / "merged"
        there = [merged / name for name in files if (merged / name).is_file()]
        plain = [path for path in there if path.resolve() == path]
        folders = sorted({folder for path in plain for folder in path.parents if merged in folder.parents})

        binds = [("--bind", folder) for folder in folders] + [("--ro-bind", path) for path in plain]
        return [word for kind, path in binds for word in (kind, str(path), f"{WORKSPACE}/{path.relative_to(merged)}")]

    def _mount(self, lower: Path) -> int:
        """Make the slot's mounts, in a new namespace whose descriptor is returned."""
        disk = self._folder / "disk"
        merged = self._folder / "merged"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(self._folder, self._uid, self._uid)
        disk.mkdir(exist_ok=True)
        merged.mkdir(exist_ok=True)

        namespace = syscalls.enter_new_mount_namespace()
        options = f"size={self.limits.disk_bytes},nr_inodes={_INODES},mode=0755"
        syscalls.mount("tmpfs", disk, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV, options)

        for name in ("upper", "tmp", "home", "shm"):
            (disk / name).mkdir()
            os.chown(disk / name, self._uid, self._uid)
        (disk / "work").mkdir()

        layers = f"lowerdir={lower},upperdir={disk}/upper,workdir={disk}/work"
        syscalls.mount("overlay", merged, "overlay", syscalls.MS_NOSUID | syscalls.MS_NODEV, layers)
        return namespace

    def _drop(self) -> None:
        memory.kill_tree(self._tree)
        if self._namespace >= 0:
            # This descriptor is the only user of the slot's mounts: they end here.
            os.close(self._namespace)
        shutil.rmtree(self._folder, ignore_errors=True)


def _claim_uids() -> tuple[int, int]:
    """(descriptor of the lock, first uid) of a block that no other process uses."""
    try:
        STATE.mkdir(mode=0o711, parents=True, exist_ok=True)
        for block in range(_PROCESSES):
            lock = STATE.parent / f"fresco-uids-{block}.lock"
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return descriptor, _FIRST_UID + block * _UIDS_PER_PROCESS
            os.close(descriptor)
    except OSError as error:
        raise SandboxError(f"{STATE} cannot be used: {error}") from error

    raise SandboxError(f"{_PROCESSES} processes of this machine use sandboxes already")

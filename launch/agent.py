"""The agent of one machine of a cluster, kept by `fresco join`: `python -m launch.agent HEAD LEASE_FD FOLDER NUMBER`.

It needs the head's address, and on its standard input the agents' key. What the run is, its key and the files that it
begins with come over the connection. Where the head's own folders are seen here, they are used as they are. The agent
begins, watches and ends processes as the head says. After a lease without an answer it kills them all and ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import select
import signal
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import zmq

from launch.children import Exits
from launch.gpus import visible_gpus
from launch.launcher import node_messages as m
from launch.launcher.copies import is_known
from launch.launcher.folders import TRIES, Fetcher, Opened, known_changes, made_in
from launch.launcher.local import LocalHandle, LocalLauncher
from launch.launcher.members import Lease
from launch.launcher.node_messages import boot_time
from launch.launcher.protocol import Spec
from launch.machine import size_text
from rl.config.lora import served_adapter
from rl.learner.changes import CHANGES, WISH
from rl.store.digests import FileDigest, file_digest
from rl.store.made_once import cache_folder
from rl.weights.host import clean_up
from rl.wire.process import die_with_parent
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import KEY_FILE, RunFile, key_pair
from rl.wire.sockets import send_frames

LOST = 3  # the exit code where there was no contact with the head
_HELLO_S = 1.0
_HEAD_S = 60.0  # for the head to answer at all
_TURN_S = 0.25
_ASK_S = 2.0  # after which a part of a file is asked for again
_WEIGHTS = ".safetensors"
_STATE = ".distcp"  # of the ranks, in a checkpoint
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENDS_S = 2.0  # for the kernel to end a killed process
_ARRIVES_MS = 2000  # for the last words to leave
LEASE = struct.Struct("d")
KEY_BYTES = 81  # public and secret key, with what stands between


class Agent:
    """lease_fd: a pipe to the keeper, which is told until when the lease holds."""

    def __init__(self, head: str, key: tuple[bytes, bytes], lease_fd: int, folder: Path, machine: int) -> None:
        self._head = head
        self._lease_fd = lease_fd
        self._folder = folder
        self._machine = machine
        self._code = m.code_hash()
        self._gpus = [gpu.name for gpu in visible_gpus()]

        self._identity = b"agent." + secrets.token_hex(8).encode()
        self._socket = m.agent_socket(zmq.DEALER, key, self._identity)
        self._socket.connect(f"tcp://{head}")

        self._exits = Exits()
        self._receiver: Receiver[m.FromHead] = Receiver(
            {self._socket: self._from_head}, Malformed("agent"), self._exits.fileno(), codec=m.codec
        )

        self._hellos: list[float] = []
        self._lease: Lease | None = None
        self._names = b""  # the key of the run's names
        self._number = 0  # of this machine
        self._files: Files
        self._run: RunFile
        self._launcher: LocalLauncher

        self._is_shared = False
        self._waiting: dict[str, m.Start] = {}  # for files
        self._handles: dict[str, LocalHandle] = {}
        self._taken: dict[str, list[str]] = {}  # the GPUs of each process
        self._states: dict[str, int | None] = {}
        self._held: dict[str, int] = {}  # bytes of each log that the head has
        self._told: dict[str, int | None] = {}
        self._sending: Opened | None = None
        self._fetcher: Fetcher

        self._begun: m.Begin | None = None  # what the ranks here began from
        self._copy: m.Sent | None = None  # what is fetched to be held here, or cannot be
        self._wish = b""  # what was asked last of the ranks here
        self._leaving = False
        self._ended = ""  # why, as soon as it is to end

    def serve(self) -> int:
        """Until the run ends, or the lease. Returns the exit code."""
        begun = boot_time()
        next_at = begun
        while not self._ended:
            now = boot_time()
            if now >= next_at:
                next_at = now + self._speak(now)
            self._receiver.wait(min(_TURN_S, max(0.0, next_at - now)))
            self._exits.clear()
            self._receiver.drain()
            self._hear_keeper()

            if self._lease is None:
                if boot_time() > begun + _HEAD_S:
                    self._ended = f"no head at {self._head} answers to this key within {_HEAD_S:g} s"
            elif boot_time() > self._lease.until:
                self._ended = f"no contact with the head at {self._head}: the lease is over"
            else:
                self._look()
                if self._states != self._told:
                    next_at = now
        return self._end()

    # ------------------------------------------------------------ said

    def _speak(self, now: float) -> float:
        """Say what is. Returns the seconds until it is to be said again."""
        if self._lease is None:
            self._hellos.append(now)
            self._send(m.Hello(len(self._hellos) - 1, self._gpus, self._code, self._machine))
            return _HELLO_S
        if (ask := self._files.ask(now)) is not None:
            self._send(ask)

        self._told = dict(self._states)
        answered, changes = b"", b""
        made: dict[str, str] = {}
        if not self._is_shared:  # in this order: an undo drops checkpoints before it is answered
            answered = b"" if (self._run.folder / WISH).exists() else self._wish
            changes = known_changes(self._run.folder)
            made = made_in(self._run.folder)

        about = self._told, self._logs(), self._is_shared, self._leaving
        came = self._files.came + self._fetcher.came(now)
        self._send(m.Beat(self._lease.beat(now), *about, made, answered, changes, list(self._waiting), came))
        return min(1.0, self._lease.seconds / 10)

    def _logs(self) -> dict[str, tuple[int, bytes]]:
        """What the head lacks of the logs, where it does not see them. Of what is long, the end; of many, some now: a
        message that is too long ends the connection."""
        if self._is_shared:
            return {}
        found = {}
        room = m.CHUNK_BYTES

        for name in self._states:
            with contextlib.suppress(FileNotFoundError), self._log(name).open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                begin = max(self._held.get(name, 0), size - m.TAIL_BYTES)
                log.seek(begin)
                if data := log.read(min(m.TAIL_BYTES, room)):
                    found[name] = begin, data
                    room -= len(data)
        return found

    def _log(self, name: str) -> Path:
        return self._run.folder / "logs" / f"{name}.log"

    def _send(self, message: m.FromAgent) -> None:
        send_frames(self._socket, m.codec.encode(message))

    # ------------------------------------------------------------ heard

    def _from_head(self, message: m.FromHead, _peer: bytes) -> None:
        match message:
            case m.Refused(reason):
                self._ended = f"the head at {self._head} refuses: {reason}"
            case m.Welcome() if self._lease is None:
                self._join(message)
            case m.Orders() if self._lease is not None:
                self._obey(message, self._lease)

            case m.Who() if self._lease is not None:
                self._send(self._back(self._lease))
            case m.Want(name) if self._lease is not None and is_known(name):
                self._send(m.Sent(name, self._open(name)))
            case m.Sent(name) if self._lease is not None and is_known(name):
                self._hold(message)
            case m.Ask() if self._sending is not None:
                self._send(self._sending.part(message))

            case m.Part() if self._lease is not None:
                with self._telling():
                    if self._fetcher.take(message, boot_time()):
                        self._ask()
                        return
                self._files.take(message)
                if (ask := self._files.ask(boot_time())) is not None:
                    self._send(ask)

    def _back(self, lease: Lease) -> m.Back:
        """What a head that has just begun must know. Its lease goes on once that is answered."""
        alive = [name for name, code in self._states.items() if code is None]
        holds = {name: self._taken[name] for name in alive}
        who = self._run.run_id, self._number, self._gpus, self._is_shared, self._names
        return m.Back(lease.beat(boot_time()), *who, holds, self._held)

    def _hear_keeper(self) -> None:
        if not self._leaving and select.select([0], [], [], 0)[0]:
            self._leaving = True
            if self._lease is None:
                self._ended = "told to leave"

    def _join(self, welcome: m.Welcome) -> None:
        told = RunFile.model_validate_json(welcome.run)
        self._files = Files(told, welcome.files, self._identity.decode())
        with contextlib.suppress(OSError):
            self._is_shared = self._files.seen and f'"{told.run_id}"' in (told.folder / "run.json").read_text()

        name = f"{told.folder.name}@{welcome.machine}.{told.run_id}"
        folder = told.folder if self._is_shared else (told.config.runs / name).absolute()

        try:
            (folder / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._ended = (
                f"runs={str(told.config.runs)!r} cannot be written here ({error.strerror}); go to another folder"
            )
            return

        self._run = self._files.placed(told.model_copy(update={"folder": folder, "socket_folder": self._folder}))
        if not self._is_shared:  # the head's folder has both
            with open(os.open(folder / KEY_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(welcome.key)
            self._run.save()

        (self._folder / "run.json").write_text(self._run.model_dump_json())
        self._names = welcome.names
        self._number = welcome.machine

        self._run.addresses.host = self._own_address()
        self._launcher = LocalLauncher(self._run)
        self._fetcher = Fetcher(folder, self._run.save_s)
        self._lease = Lease(welcome.lease_s, self._hellos[welcome.number])
        self._renewed()
        print(f"machine {welcome.machine} of {told.folder.name}, in {folder}", flush=True)

    def _own_address(self) -> str:
        """At which the head reaches this machine."""
        host, _, port = self._head.rpartition(":")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])

    def _renewed(self) -> None:
        assert self._lease is not None
        os.write(self._lease_fd, LEASE.pack(self._lease.until))

    def _obey(self, orders: m.Orders, lease: Lease) -> None:
        lease.answered(orders.beat)
        self._renewed()
        self._held |= orders.held
        for start in orders.start:
            if start.name not in self._states:
                self._states[start.name] = None
                self._taken[start.name] = [gpu for gpu in start.environment.get(_VISIBLE, "").split(",") if gpu]
                self._waiting[start.name] = start
                self._files.want(_role(start.name))
                if start.begin is not None and start.begin != self._begun:
                    self._begin_from(start.begin)

        for name in orders.kill:
            self._waiting.pop(name, None)
            if name in self._handles:
                self._handles[name].kill()
            else:
                self._states[name] = -signal.SIGKILL  # it never begins

        if orders.wish != self._wish:
            self._wish = orders.wish
            self._ask_ranks()
        if orders.end:
            self._ended = "the run has ended" if not self._leaving else "left"

    # ------------------------------------------------------------ processes

    def _look(self) -> None:
        """Begin what has its files, and note what has ended."""
        ended = None
        with self._telling():
            ended = self._fetcher.ended()

        if ended is not None and self._copy is not None:
            if ended:
                self._fetcher.drop_checkpoints(name for name in made_in(self._run.folder) if name != self._copy.name)
            self._copy = None
        elif ended is False and self._begun is not None:
            print(f"! {self._begun.name} was damaged on its way, and is fetched again", file=sys.stderr, flush=True)
            self._fetcher.begin(self._begun.name, self._begun.files)

        self._ask()
        for name, start in list(self._waiting.items()):
            if self._files.are_there(_role(name)) and not (start.begin is not None and self._fetcher.is_busy):
                del self._waiting[name]
                self._begin(start)
        for name, handle in self._handles.items():
            if self._states[name] is None and (code := handle.poll()) is not None:
                handle.kill()  # what is left of its group: who hears of its end may rely on it
                self._states[name] = code

    def _open(self, name: str) -> dict[str, m.File]:
        """Keep a folder open that the head wants; nothing where it is gone meanwhile."""
        self._sending = None
        with contextlib.suppress(OSError):
            self._sending = Opened(self._run.folder, name)
        return self._sending.files if self._sending is not None else {}

    def _ask_ranks(self) -> None:
        """They find the wish here, or find none where it was withdrawn."""
        path = self._run.folder / WISH
        if not self._wish:
            path.unlink(missing_ok=True)
            return
        partial = path.with_name(f"{WISH}.arriving")
        partial.write_bytes(self._wish)
        partial.rename(path)

    def _begin_from(self, begin: m.Begin) -> None:
        """The ranks stood elsewhere: what stands here is of a time that was taken back."""
        self._begun = begin
        self._run = self._run.model_copy(update={"timeline": begin.timeline})
        (self._folder / "run.json").write_text(self._run.model_dump_json())
        if self._is_shared:  # the head has seen to it
            return

        if not self._fetcher.brings(begin.name, begin.digest):
            self._fetcher.cancel()
        self._copy = None
        self._fetcher.forget_others(begin.name)
        (self._run.folder / CHANGES).write_bytes(begin.changes)
        missing = begin.name and made_in(self._run.folder).get(begin.name) != begin.digest
        if missing and not self._fetcher.is_busy:
            self._fetcher.begin(begin.name, begin.files)

    def _hold(self, sent: m.Sent) -> None:
        """What stands in the head's folder is to be here as well. What the ranks here begin from goes before."""
        for_ranks = self._fetcher.is_busy and self._copy is None
        if for_ranks or self._fetcher.is_finishing or sent == self._copy:
            return
        if made_in(self._run.folder).get(sent.name) != sent.digest:
            self._fetcher.cancel()
            self._copy = sent
            self._begun = None  # ranks that begin here once more may find other steps
            with self._telling():
                self._fetcher.begin(sent.name, sent.files)
                self._ask()

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """A full disk ends a copy that is to be held here, and nothing else."""
        try:
            yield
        except OSError as error:
            if self._copy is None:
                raise
            print(f"! {self._copy.name} cannot be held in {self._run.folder}: {error}", file=sys.stderr, flush=True)
            self._fetcher.cancel()

    def _ask(self) -> None:
        for ask in self._fetcher.asks(boot_time()):
            self._send(ask)

    def _begin(self, start: m.Start) -> None:
        here = {"--run": str(self._folder), "--host": str(self._run.addresses.host)}
        arguments = list(start.arguments)
        for option, value in here.items():
            arguments[arguments.index(option) + 1] = value
        spec = Spec(start.name, start.module, tuple(arguments), start.environment, self._log(start.name))
        self._handles[start.name] = handle = self._launcher.start(spec, self._launcher.place("", 0))
        self._exits.watch(handle)

    def _end(self) -> int:
        """Kill all that is left, and say so."""
        orderly = self._ended in ("the run has ended", "left", "told to leave")
        print(self._ended, file=sys.stdout if orderly else sys.stderr, flush=True)
        if self._lease is not None:
            for handle in self._handles.values():
                handle.kill()
            self._launcher.close()

            if orderly:
                killed: dict[str, int | None] = {}
                for name, code in self._states.items():
                    begun = self._handles.get(name)
                    ended = code if code is not None or begun is None else begun.wait(_ENDS_S)
                    killed[name] = -signal.SIGKILL if ended is None else ended
                self._send(m.Beat(self._lease.beat(boot_time()), killed, self._logs(), self._is_shared, leaving=True))
            clean_up(self._run.run_id)
            if orderly:  # nothing runs here any more: what is dropped has the time of a disk, and not of a lease
                os.write(self._lease_fd, LEASE.pack(boot_time() + self._run.save_s))
            self._fetcher.close()

        self._socket.close(linger=_ARRIVES_MS if orderly else 0)
        zmq.Context.instance().term()
        return 0 if orderly else LOST if self._lease is not None else 1


def _role(name: str) -> str:
    """`generator` of `generator.0.2`."""
    return name.partition(".")[0]


class Files:
    """The files that a run begins with. Those of the head are used where they are seen here; else each is asked for
    when a process first needs it, and kept for the next run."""

    def __init__(self, run: RunFile, files: dict[str, m.File], me: str) -> None:
        self._files = files
        self._me = me
        # An engine begins with random weights and is sent its own, but for those below an adapter.
        reads_model = ("learner",) if served_adapter(run.config.model) is None else ("learner", "generator")
        self._readers = {"model": reads_model, "teacher": ("teacher",), "resume": ("learner",)}
        self._folders = {}
        self.seen = True
        """Whether all of them are."""

        for name, folder in m.start_folders(run).items():
            own = {path: file for path, file in files.items() if path.startswith(f"{name}/")}
            seen = all(_looks_like(folder / path.partition("/")[2], file) for path, file in own.items())
            named = hashlib.blake2b(msgspec.json.encode(own), digest_size=16).hexdigest()
            self._folders[name] = folder if seen else cache_folder() / "from_head" / named
            self.seen &= seen or name == "resume"  # which has a path of the head's own

        self._wanted: list[str] = []
        self.came = 0
        """How many parts, of files that were begun `TRIES` times at most."""
        self._tries: Counter[str] = Counter()
        self._digest = FileDigest()  # of what has come of the first of them
        self._asked_at = float("-inf")

    def placed(self, run: RunFile) -> RunFile:
        """The run with these folders."""
        found = self._folders
        config = run.config.model_copy(update={"resume": found.get("resume")})
        folders = {"model_folder": found.get("model"), "teacher_folder": found.get("teacher")}
        return run.model_copy(update=folders | {"config": config})

    def want(self, role: str) -> None:
        """A process of this role is to begin, which needs them. The small ones come first: others may need no more."""
        needed = [path for path in self._needed(role) if not self._path(path).exists()]
        wanted = [*self._wanted, *(path for path in needed if path not in self._wanted)]
        begun = [path for path in wanted[:1] if self._partial(path).exists()]
        self._wanted = begun + sorted(wanted[len(begun) :], key=_is_large)

    def are_there(self, role: str) -> bool:
        return not set(self._needed(role)) & set(self._wanted)

    def ask(self, now: float) -> m.Ask | None:
        """What is to be asked for next, unless it was asked for just now."""
        if not self._wanted or now < self._asked_at + _ASK_S:
            return None
        self._asked_at = now
        partial = self._partial(self._wanted[0])
        return m.Ask(self._wanted[0], partial.stat().st_size if partial.exists() else 0)

    def take(self, part: m.Part) -> None:
        """A part that was asked for; any other is dropped. The digest grows with them: to read 20 GB once more would
        take as long as a lease."""
        if not self._wanted or self._wanted[0] != part.file:  # late, perhaps of a checkpoint
            return
        partial = self._partial(part.file)
        partial.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("ab") as file:
            if file.tell() != part.offset:
                return
            file.write(part.data)

        wanted = self._files[part.file]
        if part.offset == 0:
            self._digest = FileDigest()
            self._tries[part.file] += 1
            if wanted.size > m.CHUNK_BYTES:
                print(f"fetching {part.file}, {size_text(wanted.size)}", flush=True)

        self._digest.update(part.data)
        if not part.data and wanted.size:  # the head's own is shorter by now: it is asked again after a while
            return

        self.came += self._tries[part.file] <= TRIES
        self._asked_at = float("-inf")
        size = part.offset + len(part.data)
        if size < wanted.size:
            return

        if (size, self._digest.hexdigest()) != (wanted.size, wanted.digest):
            if self._tries[part.file] == TRIES:
                print(f"! the head's {part.file} was changed since the run began", file=sys.stderr, flush=True)
            partial.unlink()  # it is asked for again
            return
        partial.rename(self._path(part.file))
        del self._wanted[0]

    def _needed(self, role: str) -> list[str]:
        """All texts; the checkpoint to begin from, and weights, only who computes with them."""
        others = [folder for folder, readers in self._readers.items() if role not in readers]
        large = [path for path in self._files if path.startswith("resume/") or path.endswith(_WEIGHTS)]
        spared = {path for path in large if path.partition("/")[0] in others}
        return [path for path in self._files if path not in spared]

    def _path(self, path: str) -> Path:
        folder, _, name = path.partition("/")
        return self._folders[folder] / name

    def _partial(self, path: str) -> Path:
        target = self._path(path)
        return target.with_name(f".{target.name}.{self._me}")


def _is_large(path: str) -> bool:
    return path.endswith((_WEIGHTS, _STATE))


def _looks_like(path: Path, file: m.File) -> bool:
    """Of weights the size decides: reading gigabytes of them would take longer than a lease."""
    if _is_large(path.name):
        return path.is_file() and path.stat().st_size == file.size
    return _is(path, file)


def _is(path: Path, file: m.File) -> bool:
    return path.is_file() and path.stat().st_size == file.size and file_digest(path) == file.digest


def main() -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the keeper says when to leave
    signal.signal(signal.SIGTERM, lambda *_: None)  # which a batch system sends to every process
    head, lease_fd, folder, machine = sys.argv[1:]
    key = b"".join(os.read(0, 1) for _ in range(KEY_BYTES))
    sys.exit(Agent(head, key_pair(key), int(lease_fd), Path(folder), int(machine)).serve())


if __name__ == "__main__":
    main()

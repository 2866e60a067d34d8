"""The launcher of several machines: broker and proxy are children of the head, all else is begun by agents.

The head decides what stands where, an agent (`agent.py`) does it. A thread talks with the agents, so that a busy head
keeps their leases alive. A process is dead when its agent has said so, or when the lease of its machine has been over
for so long that nothing can run there (`members.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

import zmq

from launch.launcher.engines import Agents, begin_agents
from launch.launcher.local import Begin, LocalLauncher, begin_process
from launch.launcher.members import AT_HEAD, Member, Members
from launch.launcher.node_messages import (
    CHUNK_BYTES,
    KEY_FILE,
    Ask,
    Beat,
    File,
    FromAgent,
    FromHead,
    Hello,
    Orders,
    Part,
    Refused,
    Start,
    Welcome,
    agent_socket,
    boot_time,
    code_hash,
    codec,
    start_folders,
)
from launch.launcher.protocol import Handle, Node, Spec
from rl.config.schema import ConfigError
from rl.store.digests import file_digest
from rl.wire.codec import ProtocolError
from rl.wire.process import clear_event
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import KEY_FILE as RUN_KEY
from rl.wire.run import RunFile, key_pair, numeric
from rl.wire.sockets import PeerGone, make_curve_key, send_frames_to

_TURN_S = 0.1
_ENDS_S = 10.0  # for agents to end what they began
_ANYWHERE = Node("a machine of the cluster", "0.0.0.0")


class ClusterLauncher:
    """begin: how the head's own children begin. Waits until the machines of the plan are there.

    Raises ConfigError if they are not within `timeouts.start_s`.
    """

    def __init__(self, run: RunFile, begin: Begin = begin_process) -> None:
        cluster = run.config.cluster
        self._run = run
        self._local = LocalLauncher(run, begin)
        self._members = Members(cluster.count, cluster.fence_s, cluster.place)
        self._handles: dict[str, RemoteHandle] = {}
        self._lock = threading.RLock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._joined = threading.Event()
        self._closing = False
        self._code = code_hash()
        self._files = _files_of(run)

        make_curve_key(run.folder, KEY_FILE)
        self._socket = agent_socket(zmq.ROUTER, key_pair((run.folder / KEY_FILE).read_bytes()))
        self._socket.bind(f"tcp://{numeric(run.config.network.host)}:*")
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._thread = threading.Thread(target=self._serve, name="agents", daemon=True)
        self._thread.start()

        self._engine = Agents()
        try:
            self._engine = begin_agents(run, self.address)
            self._await_machines()
        except BaseException:
            self.close()
            raise

    def place(self, role: str, index: int) -> Node:
        """Broker and proxy stand here; of all others it is decided when they start."""
        return self._local.place(role, index) if role in AT_HEAD else _ANYWHERE

    def start(self, spec: Spec, node: Node) -> Handle:
        """A child of this process, or of an agent. Where no machine has room for it, it starts once one has."""
        if node is not _ANYWHERE:
            return self._local.start(spec, node)
        with self._lock:
            handle = self._handles[spec.name] = RemoteHandle(spec, self._lock, self._wake)
            self._find_room(handle)
        self._wake()
        return handle

    def close(self) -> None:
        """Every agent ends with what is left of its processes, and so do those that brought it."""
        self._closing = True
        self._wake()
        self._thread.join(_ENDS_S + 2)
        self._engine.close()
        self._local.close()

    def _await_machines(self) -> None:
        wanted = self._run.config.cluster.count
        print(f"waiting for {wanted} machines: fresco join {self.address} --key {self._run.folder / KEY_FILE}")
        sys.stdout.flush()

        until = time.monotonic() + self._run.config.timeouts.start_s
        while not self._joined.wait(_TURN_S):
            if wrong := self._engine.wrong():
                raise ConfigError(f"cluster.engine={self._run.config.cluster.engine}: {wrong}")
            if time.monotonic() > until:
                there = len(self._members.by_agent)
                raise ConfigError(
                    f"cluster.nodes: {there} of {wanted} machines have joined within timeouts.start_s="
                    f"{self._run.config.timeouts.start_s:g} s"
                )

        with self._lock:
            if not any(each.sees for each in self._members.by_agent.values()):
                raise ConfigError(
                    f"runs={str(self._run.config.runs)!r}: no machine sees this folder of the head, where a learner's "
                    "checkpoints stand; share it with one at least, or let the head's machine join as well"
                )

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ the thread

    def _serve(self) -> None:
        receiver: Receiver[FromAgent] = Receiver(
            {self._socket: self._from_agent}, Malformed("head"), self._wake_fd, codec=codec
        )
        until = float("inf")
        while time.monotonic() < until and not (self._closing and not self._members.by_agent):
            receiver.wait(_TURN_S)
            news = clear_event(self._wake_fd)
            receiver.drain()

            with self._lock:
                for member in self._members.lost(boot_time()):
                    self._gone(member, f"its machine {member.number} is lost: no contact for its lease")
                for member in self._members.by_agent.values() if news or self._closing else ():
                    self._order(member, beat=None)
            if self._closing:
                until = min(until, time.monotonic() + _ENDS_S)
        self._socket.close(linger=500)

    def _from_agent(self, message: FromAgent, peer: bytes) -> None:
        with self._lock:
            match message:
                case Hello():
                    self._welcome(message, peer)
                case Ask():
                    self._send(peer, self._part(message))
                case Beat():
                    member = self._members.heard(boot_time(), peer)
                    if member is None:
                        self._send(peer, Orders(message.number, end=True))
                    else:
                        self._note(member, message)

    def _welcome(self, hello: Hello, peer: bytes) -> None:
        if hello.code != self._code:
            self._send(peer, Refused("its code is not the head's: install the same version of Fresco on all machines"))
            return
        news = peer not in self._members.by_agent
        member = self._members.join(boot_time(), peer, hello.gpus, hello.machine)
        run = self._run.model_dump_json().encode()
        key = (self._run.folder / RUN_KEY).read_bytes()
        lease_s = self._run.config.cluster.lease_s
        self._send(peer, Welcome(hello.number, member.number, lease_s, run, key, self._files))
        if news:
            for name in self._members.away(member.number):
                self._handles[name].move(f"it goes back to machine {member.number}")

    def _note(self, member: Member, beat: Beat) -> None:
        """What an agent says of its machine."""
        if member.sees is None:
            member.sees = beat.sees
            self._find_rooms()
            if self._members.complete():
                self._joined.set()

        for name, (offset, data) in beat.logs.items():
            if (handle := self._handles.get(name)) is not None:
                handle.read(offset, data)
        for name, code in beat.states.items():
            if code is not None and name in member.holds:
                self._members.ended(name)
                self._handles[name].ended(code)
                self._find_rooms()

        if beat.leaving and not member.leaving:
            member.leaving = True
            for name in member.holds:
                self._handles[name].move(f"its machine {member.number} leaves")
        if beat.leaving and not member.holds:
            del self._members.by_agent[member.agent]
            self._send(member.agent, Orders(beat.number, end=True))
        else:
            self._order(member, beat)

    def _order(self, member: Member, beat: Beat | None) -> None:
        """Say what is to be there. beat: what the agent has just said; without one, what was not said before."""
        handles = [self._handles[name] for name in member.holds]
        if beat is None:
            handles = [each for each in handles if each.unsaid]
            if not handles and not self._closing:
                return
        known: dict[str, int | None] = beat.states if beat is not None else {}
        for each in handles:
            each.unsaid = False

        start = [each.as_start(member.holds[each.spec.name]) for each in handles if each.spec.name not in known]
        kill = [each.spec.name for each in handles if each.killed]
        held = {name: self._handles[name].log_bytes for name in known if name in self._handles}
        self._send(member.agent, Orders(beat.number if beat else 0, start, kill, held, end=self._closing))

    def _gone(self, member: Member, why: str) -> None:
        for name in member.holds:
            self._handles[name].ended(-signal.SIGKILL, why)
        self._find_rooms()

    def _find_rooms(self) -> None:
        """Begin what has waited for a machine."""
        for handle in self._handles.values():
            if handle.waits:
                self._find_room(handle)
        self._wake()

    def _find_room(self, handle: RemoteHandle) -> None:
        handle.waits = self._members.assign(handle.spec.name, len(handle.spec.gpus)) is None

    def _send(self, peer: bytes, message: FromHead) -> None:
        with contextlib.suppress(PeerGone, zmq.Again):
            send_frames_to(self._socket, peer, codec.encode(message))

    def _part(self, ask: Ask) -> Part:
        """Raises ProtocolError for what is no file of the run's beginning."""
        if ask.file not in self._files or ask.offset < 0:
            raise ProtocolError(f"{ask.file!r} is no file that the run begins with")
        folder, _, name = ask.file.partition("/")
        with (start_folders(self._run)[folder] / name).open("rb") as file:
            file.seek(ask.offset)
            return Part(ask.file, ask.offset, file.read(CHUNK_BYTES))


class RemoteHandle:
    """A process on another machine. The launcher's thread says when it has ended."""

    why = ""
    """Why it ended, where that is no fault of its own: its machine is lost, or leaves."""

    def __init__(self, spec: Spec, lock: threading.RLock, wake: Callable[[], None]) -> None:
        self.spec = spec
        self.waits = True
        """For a machine with room."""
        self.killed = False
        self.unsaid = True
        """Whether its agent is still to be told of it."""
        self.log_bytes = 0
        self._code: int | None = None
        self._lock = lock
        self._wake = wake
        self._has_ended = threading.Event()
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        """Its agent is told; it may be cut off, and then the lease of its machine decides."""
        with self._lock:
            self.killed = self.unsaid = True
            if self.waits:
                self.waits = False
                self.ended(-signal.SIGKILL)
        self._wake()

    def wait(self, timeout_s: float) -> int | None:
        self._has_ended.wait(timeout_s)
        return self._code

    def fileno(self) -> int:
        return self._event_fd

    def __del__(self) -> None:
        os.close(self._event_fd)

    # ------------------------------------------------------------ for the launcher's thread

    def move(self, why: str) -> None:
        """It is to end here and to begin elsewhere."""
        self.why = why
        self.kill()

    def ended(self, code: int, why: str = "") -> None:
        if self._code is None:
            self.why = self.why or why
            self._code = code
            self._has_ended.set()
            os.eventfd_write(self._event_fd, 1)

    def read(self, offset: int, data: bytes) -> None:
        """What follows in its log. A part that was left out has a line instead."""
        if offset < self.log_bytes:
            return
        with self.spec.log.open("ab" if self.log_bytes else "wb") as log:
            if offset > self.log_bytes:
                log.write(f"\n({offset - self.log_bytes} bytes stand on its machine)\n".encode())
            log.write(data)
        self.log_bytes = offset + len(data)

    def as_start(self, gpus: tuple[str, ...]) -> Start:
        """What an agent is told of it. gpus: those that it has there."""
        environment = dict(self.spec.environment)
        if "CUDA_VISIBLE_DEVICES" in environment:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        return Start(self.spec.name, self.spec.module, list(self.spec.arguments), environment)


def _files_of(run: RunFile) -> dict[str, File]:
    found = {}
    for name, folder in start_folders(run).items():
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            found[f"{name}/{path.relative_to(folder)}"] = File(path.stat().st_size, file_digest(path))
    return found

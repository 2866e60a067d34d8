"""The launcher of several machines: broker and proxy are children of the head, all else is begun by agents.

The head decides what stands where, an agent (`agent.py`) does it. A thread talks with the agents, so that a busy head
keeps their leases alive. A process is dead when its agent has said so, or when the lease of its machine has been over
for so long that nothing can run there (`members.py`).

A head that takes the place of one that died (`before`) is reached where that one was. It asks the agents that hold a
lease what they have, and goes on with it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path

import zmq

from launch.launcher import node_messages as m
from launch.launcher.copying import Copying
from launch.launcher.engines import Agents, begin_agents
from launch.launcher.head_file import Before, Began, HeadFile, Listens, Machine, Ranks
from launch.launcher.local import Begin, LocalLauncher, begin_process
from launch.launcher.members import AT_HEAD, KEEPS, Member, Members
from launch.launcher.node_messages import boot_time
from launch.launcher.protocol import Found, Handle, Node, Spec
from launch.launcher.remote import RemoteHandle
from rl.config.plugins import told
from rl.config.schema import ConfigError
from rl.observe.trace import boot_id
from rl.store.digests import file_digest, written_digests
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
    """begin: how the head's own children begin. Waits until the machines of the plan are there; in the place of a head
    `before`, until those that were there are back, or their leases are over.

    Raises ConfigError if they are not within `timeouts.start_s`, or the port of the head before is taken.
    """

    def __init__(self, run: RunFile, begin: Begin = begin_process, before: Before | None = None) -> None:
        cluster = run.config.cluster
        self._run = run
        self._local = LocalLauncher(run, begin)
        self._members = Members(cluster.count, cluster.fence_s, cluster.place)
        self._copying = Copying(run, self._send)

        self._handles: dict[str, RemoteHandle] = {}
        self._lock = threading.RLock()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._joined = threading.Event()
        self._closing = False
        self._failure: Exception | None = None  # of the thread
        self._code = m.code_hash()
        self._files = _files_of(run)

        self.found: dict[str, Found] = {}
        self._returning = set(before.agents) if before is not None else set()
        self._is_open = before is None
        """Whether others than those of the head before may join."""
        self._file = HeadFile(run.folder)
        self._has_said_where = False

        if before is None:
            make_curve_key(run.folder, m.KEY_FILE)
            run.make_names()
        self._socket = self._listen(before.listens if before is not None else None)
        self.address = self._socket.get_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")
        self._thread = threading.Thread(target=self._talk, name="agents", daemon=True)
        self._thread.start()

        self._engine = Agents()
        try:
            if before is None:
                self._engine = begin_agents(run, self.address)
                self._await_machines()
            else:
                self._await_return(before)
        except BaseException:
            self.close()
            raise

    def place(self, role: str, index: int) -> Node:
        """Broker and proxy stand here; of all others it is decided when they start."""
        return self._local.place(role, index) if role in AT_HEAD else _ANYWHERE

    @property
    def is_back(self) -> bool:
        """Whether any machine of the head before is there."""
        return bool(self._members.by_agent)

    def start(self, spec: Spec, node: Node) -> Handle:
        """A child of this process, or of an agent. Where no machine has room for it, it starts once one has.

        Raises what has ended the talk with agents, as a full disk does.
        """
        if not self._has_said_where:
            self._has_said_where = True
            control = self._run.address_of("control") or self.address
            self._file.write(Listens(_port(self.address), _port(control), boot_id()))
        self._file.write(Began(spec.name))

        if node is not _ANYWHERE:
            return self._local.start(spec, node)
        with self._lock:
            if self._failure is not None:
                raise self._failure
            handle = self._handles[spec.name] = self._remote(spec)
            self._find_room(handle)
        self._wake()
        return handle

    def close(self) -> None:
        """Every agent ends with what is left of its processes, and so do those that brought it. No head comes after."""
        self._await_copies()
        self._closing = True
        self._wake()
        self._thread.join(_ENDS_S + 2)
        self._engine.close()
        self._local.close()
        self._copying.close()
        self._file.remove()

    def _await_copies(self) -> None:
        """What the learner's machine has made is worth a wait, as long as it comes."""
        patience_s = self._run.config.timeouts.hang_s
        said = ""
        begun = boot_time()

        while name := self._still_to_come():
            why = ""
            if self._failure is not None:
                why = told(self._failure)
            elif boot_time() > max(begun, self._copying.heard) + patience_s:
                why = f"nothing came for {patience_s:g} s"
            if why:
                print(f"! {name} was not copied: {why}; it stands on its machine", flush=True)
                return

            if name != said:
                print(f"copying {name} from the learner's machine", flush=True)
            said = name
            time.sleep(_TURN_S)

    def _still_to_come(self) -> str:
        with self._lock:
            return self._copying.still_to_come(self._members.by_agent)

    def _listen(self, known: Listens | None) -> zmq.SyncSocket:
        """Where agents find the head: at a free port, or at the known one."""
        host = numeric(self._run.config.network.host)
        if known is not None:
            self._run.addresses.ports["control"] = known.control
        listener = m.agent_socket(zmq.ROUTER, key_pair((self._run.folder / m.KEY_FILE).read_bytes()))
        try:
            listener.bind(f"tcp://{host}:{known.agents if known is not None else '*'}")
        except zmq.ZMQError as error:
            listener.close(linger=0)
            where = f"{host}:{known.agents if known is not None else '*'}"
            raise ConfigError(f"network.host={host!r}: {where}, where agents look for the head: {error}") from None
        return listener

    def _await_return(self, before: Before) -> None:
        """Until all agents that were there are back, or the lease of every other one is over."""
        cluster = self._run.config.cluster
        if before.ranks is not None:
            self._copying.go_on(before.ranks.encode())
        print(f"waiting for {len(before.agents)} machines, at most {cluster.fence_s:g} s", flush=True)
        until = boot_time() + cluster.fence_s
        while boot_time() < until and not self._joined.wait(_TURN_S):
            pass

        with self._lock:
            if self._returning:
                print(f"machines that are not back, so their leases are over: {len(self._returning)}", flush=True)
            for agent in self._returning:
                self._file.write(Machine(agent, there=False))
            self._returning.clear()
            self._is_open = True
            for process, newest in before.newest.items():
                self.found[process] = self._found(process, newest)

    def _found(self, process: str, newest: int) -> Found:
        """What has become of it. Of earlier incarnations nothing may be left."""
        for name, handle in self._handles.items():
            earlier, _, incarnation = name.rpartition(".")
            if earlier == process and int(incarnation) < newest:
                handle.kill()

        name = f"{process}.{newest}"
        if name not in self._handles:
            self._handles[name] = self._remote(Spec(name, "", (), {}, self._log(name)))
            self._handles[name].waits = False
            self._handles[name].ended(-signal.SIGKILL, "ended while the run had no head")
        return Found(newest, self._handles[name])

    def _remote(self, spec: Spec) -> RemoteHandle:
        return RemoteHandle(spec, self._lock, self._wake)

    def _log(self, name: str) -> Path:
        return self._run.folder / "logs" / f"{name}.log"

    def _await_machines(self) -> None:
        wanted = self._run.config.cluster.count
        print(f"waiting for {wanted} machines: fresco join {self.address} --key {self._run.folder / m.KEY_FILE}")
        sys.stdout.flush()

        until = time.monotonic() + self._run.config.timeouts.start_s
        while not self._joined.wait(_TURN_S):
            if self._failure is not None:
                raise self._failure
            if wrong := self._engine.wrong():
                raise ConfigError(f"cluster.engine={self._run.config.cluster.engine}: {wrong}")
            if time.monotonic() > until:
                there = len(self._members.by_agent)
                raise ConfigError(
                    f"cluster.nodes: {there} of {wanted} machines have joined within timeouts.start_s="
                    f"{self._run.config.timeouts.start_s:g} s"
                )

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------ the thread

    def _talk(self) -> None:
        """What ends the talk ends the run: without it nobody would hear of a process that has ended."""
        try:
            self._serve()
        except Exception as error:
            with self._lock:
                self._failure = error
                for handle in self._handles.values():
                    handle.ended(-signal.SIGKILL, f"the head talks with no machine any more: {told(error)}")
        finally:
            self._socket.close(linger=500)

    def _serve(self) -> None:
        receiver: Receiver[m.FromAgent] = Receiver(
            {self._socket: self._from_agent}, Malformed("head"), self._wake_fd, codec=m.codec
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
                self._copy()
            if self._closing:
                until = min(until, time.monotonic() + _ENDS_S)

    def _copy(self) -> None:
        """Go on with what is copied. Ranks may wait for the end of it."""
        finishing = self._copying.is_finishing
        self._copying.turn()
        if not finishing:
            return
        for name, handle in self._handles.items():
            if handle.waits and name.startswith(KEEPS):
                handle.came = self._copying.came
        if not self._copying.is_finishing:
            self._find_rooms()

    def _from_agent(self, message: m.FromAgent, peer: bytes) -> None:
        with self._lock:
            match message:
                case m.Hello():
                    if self._is_open:
                        self._welcome(message, peer)
                case m.Ask():
                    self._send(peer, self._part(message))
                case m.Sent():
                    self._copying.sent(peer, message)
                case m.Part():
                    self._copying.take(peer, message)

                case m.Back() if _name(peer) in self._returning and message.run_id == self._run.run_id:
                    self._come_back(message, peer)
                case m.Back():
                    self._send(peer, m.Orders(message.number, end=peer not in self._members.by_agent))
                case m.Beat():
                    self._beat(message, peer)

    def _beat(self, beat: m.Beat, peer: bytes) -> None:
        member = self._members.heard(boot_time(), peer)
        if member is not None:
            self._note(member, beat)
        elif _name(peer) in self._returning:
            self._send(peer, m.Who())
        else:
            self._send(peer, m.Orders(beat.number, end=True))

    def _come_back(self, back: m.Back, peer: bytes) -> None:
        """An agent that has outlived the head before, with what runs there."""
        member = self._members.join(boot_time(), peer, back.gpus, back.machine)
        member.sees = back.sees
        self._run.make_names(back.names)

        for name, gpus in back.holds.items():
            handle = self._handles[name] = self._remote(Spec(name, "", (), {}, self._log(name), tuple(gpus)))
            handle.waits = handle.unsaid = False
            handle.log_bytes = back.held.get(name, 0)
            self._members.keep(member, name, gpus)

        print(f"machine {member.number} is back, with {', '.join(back.holds) or 'nothing'}", flush=True)
        self._order(member, m.Beat(back.number, dict.fromkeys(back.holds)))
        self._returning.discard(_name(peer))
        if not self._returning:
            self._joined.set()

    def _welcome(self, hello: m.Hello, peer: bytes) -> None:
        if hello.code != self._code:
            why = "its code is not the head's: install the same version of Fresco on all machines"
            self._send(peer, m.Refused(why))
            return
        news = peer not in self._members.by_agent
        member = self._members.join(boot_time(), peer, hello.gpus, hello.machine)

        run = self._run.model_dump_json().encode()
        key = (self._run.folder / RUN_KEY).read_bytes()
        lease_s = self._run.config.cluster.lease_s
        names = self._run.names.key
        self._send(peer, m.Welcome(hello.number, member.number, lease_s, run, key, names, self._files))

        if news:
            self._file.write(Machine(_name(peer), there=True))
            for name in self._members.away(member.number):
                self._handles[name].move(f"it goes back to machine {member.number}")

    def _note(self, member: Member, beat: m.Beat) -> None:
        """What an agent says of its machine."""
        if member.sees is None:
            member.sees = beat.sees
            self._find_rooms()
            if self._members.complete():
                self._joined.set()

        self._copying.copies.offered(member.agent, beat.made)
        self._copying.answered(member.agent, beat.answered, beat.changes)
        if self._copying.copies.place == b"" and member is self._members.holder():
            self._copying.hold(member.agent, beat.made)
        for name, (offset, data) in beat.logs.items():
            if (handle := self._handles.get(name)) is not None:
                handle.read(offset, data)
        for name in beat.waiting:
            if (handle := self._handles.get(name)) is not None:
                handle.came = beat.came

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
            self._file.write(Machine(_name(member.agent), there=False))
            self._send(member.agent, m.Orders(beat.number, end=True))
        else:
            self._order(member, beat)

    def _order(self, member: Member, beat: m.Beat | None) -> None:
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
        wish = self._copying.wish(member.agent)
        self._send(member.agent, m.Orders(beat.number if beat else 0, start, kill, held, wish, end=self._closing))

    def _gone(self, member: Member, why: str) -> None:
        self._file.write(Machine(_name(member.agent), there=False))
        for name in member.holds:
            self._handles[name].ended(-signal.SIGKILL, why)
        self._find_rooms()

    def _find_rooms(self) -> None:
        """Begin what has waited for a machine."""
        waiting = [handle for handle in self._handles.values() if handle.waits]
        for handle in waiting:
            self._find_room(handle)
        if waiting:
            self._wake()

    def _find_room(self, handle: RemoteHandle) -> None:
        name = handle.spec.name
        if name.startswith(KEEPS) and not self._copying.may_begin(name):
            return

        member = self._members.assign(name, len(handle.spec.gpus))
        handle.waits = member is None
        if member is not None and name.startswith(KEEPS):
            handle.begin = self._copying.begin(name, b"" if member.sees else member.agent)
            self._file.write(Ranks(_name(self._copying.copies.place or b"")))

    def _send(self, peer: bytes, message: m.FromHead) -> None:
        with contextlib.suppress(PeerGone, zmq.Again):
            send_frames_to(self._socket, peer, m.codec.encode(message))

    def _part(self, ask: m.Ask) -> m.Part:
        """Raises ProtocolError for what is no file that an agent may want."""
        if (part := self._copying.part(ask)) is not None:
            return part
        if ask.file not in self._files or ask.offset < 0:
            raise ProtocolError(f"{ask.file!r} is no file that the run begins with")
        folder, _, name = ask.file.partition("/")
        try:
            with (m.start_folders(self._run)[folder] / name).open("rb") as file:
                file.seek(ask.offset)
                return m.Part(ask.file, ask.offset, file.read(m.CHUNK_BYTES))
        except OSError as error:  # it was removed since: who needs it does not start, and nobody else is concerned
            raise ProtocolError(f"{ask.file!r} cannot be read any more: {error}") from None


def _files_of(run: RunFile) -> dict[str, m.File]:
    found = {}
    for name, folder in m.start_folders(run).items():
        known = written_digests(folder)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            below = str(path.relative_to(folder))
            found[f"{name}/{below}"] = m.File(path.stat().st_size, known.get(below) or file_digest(path))
    return found


def _name(agent: bytes) -> str:
    return agent.decode(errors="replace")


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])

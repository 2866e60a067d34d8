"""The updater in learner rank 0: a thread that owns the sockets and drives `UpdaterCore`.

    service = UpdaterService(run, process, version_bytes)
    service.start()
    service.publish(version, checksum, probe_ids, probe_logp)   # once it is announced
    service.raise_if_failed()                                   # in the main loop, and in its waits

`notices` is one DEALER per generator (a DEALER connected to several hands each message to one of them),
`weight_status` a ROUTER on which generators report. A DEALER is connected when its generator first reports. By then it
listens, and what is sent cannot go into the connection of an earlier incarnation, whose end is yet to be noticed. A
failure is weights that did not arrive as published. It is kept in `failed` and raised in the main thread. The service's
thread tells the supervisor (`Fatal`), so that it is known while the main thread waits or computes.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable

import zmq

from rl.observe.alarms import line
from rl.weights.channel import WeightsError
from rl.weights.updater import Action, Loaded, LoadFailed, Mismatch, Notify, Rest, UpdaterCore, tolerance
from rl.wire.messages import AlarmRaised, Fatal, Message, PeerDied, ProtocolError, RestNotice, Version, WeightStatus
from rl.wire.process import Process, clear_event
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import RunFile
from rl.wire.sockets import follow, open_socket, send

_TICK_S = 0.25
_STOP_S = 5.0
_PHASES = ("wait", "copy", "drain", "pause", "load")
_DIFFER = "weights-differ"


class UpdaterService:
    """Methods are for the main thread. `version_bytes`: of one version, for the statistics."""

    def __init__(self, run: RunFile, process: Process, version_bytes: int) -> None:
        config = run.config
        self._run = run
        self._process = process
        self._version_bytes = version_bytes

        self._core = UpdaterCore(
            generators=config.generator.count,
            rolling=config.rollout.alpha > 0,
            tolerance=tolerance(config),
            probe=config.weights.probe and config.generator.engine != "simulated",  # which has no such weights
        )

        self.failed: str | None = None
        self.late: list[int] = []
        """As `UpdaterCore.late` said last; a new list each time."""
        self._sums = dict.fromkeys(("count", "failed", "total", *_PHASES), 0.0)
        self._notices: dict[int, tuple[int, zmq.Socket[bytes]]] = {}  # generator -> incarnation and its DEALER
        self._events: queue.SimpleQueue[Callable[[float], list[Action]]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="updater", daemon=True)

    def start(self) -> None:
        """Bind `weight_status` and start the thread."""
        self._status = open_socket(zmq.ROUTER, self._run, "weight_status", bind=True)
        self._run.addresses.watch(self._wake)
        self._thread.start()

    def publish(self, version: Version, checksum: int | None, probe_ids: list[int], probe_logp: list[float]) -> None:
        """Tell the generators of `version`, which they can take. Returns at once."""
        self._post(lambda now: self._core.publish(now, version, checksum, probe_ids, probe_logp))

    def take(self) -> None:
        """Tell the generators to leave the devices. Returns at once."""
        self._post(self._core.take)

    def give(self) -> None:
        """They may have the devices, and the newest version. Returns at once."""
        self._post(self._core.give)

    def peer_died(self, message: PeerDied) -> None:
        """A process was fenced; only generators matter here."""
        if message.role == "generator":
            self._post(lambda now: self._core.peer_died(now, message.index, message.incarnation))

    def raise_if_failed(self) -> None:
        """Raises WeightsError once anything has failed."""
        if self.failed is not None:
            raise WeightsError(self.failed)

    def stats(self) -> dict[str, float]:
        """Cumulative: loads and bytes, and mean seconds of a load and of its phases; `failed` counts failed loads."""
        sums = self._sums
        count = max(1.0, sums["count"])
        means = {f"{phase}_mean_s": sums[phase] / count for phase in _PHASES}
        totals = {"count": sums["count"], "bytes": sums["count"] * self._version_bytes, "failed": sums["failed"]}
        return totals | {"mean_s": sums["total"] / count} | means

    def stop(self) -> None:
        """End the thread and close the sockets; idempotent."""
        self._run.addresses.unwatch(self._wake)
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _post(self, event: Callable[[float], list[Action]]) -> None:
        self._events.put(event)
        self._wake()

    def _wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def _serve(self) -> None:
        try:
            self._loop()
        except Exception as error:  # a thread's end must not go unnoticed: it fails the learner
            traceback.print_exc()
            self._fail(f"the weight updater ended: {type(error).__name__}: {error}")
        finally:
            self._status.close(linger=0)
            for _, notices in self._notices.values():
                notices.close(linger=0)

    def _loop(self) -> None:
        receiver = Receiver({self._status: self._from_generator}, Malformed("updater"), self._wake_fd)
        seen = -1  # of the addresses' changes
        while not self._stopping:
            receiver.wait(_TICK_S)
            clear_event(self._wake_fd)

            changes = self._run.addresses.changes
            if changes != seen:  # a generator may have said only now where it listens
                seen = changes
                for _, notices in self._notices.values():
                    follow(notices)
            now = time.monotonic()
            while not self._events.empty():
                self._act(self._events.get()(now))
            receiver.drain()
            self.late = self._core.late()

    def _from_generator(self, message: Message, peer: bytes) -> None:
        known = self._run.names.sender(peer, "generator", self._run.config.generator.count)
        if not isinstance(message, WeightStatus) or (message.generator, message.incarnation) != known:
            raise ProtocolError(f"{type(message).__name__} from {peer!r} on weight_status")
        self._connect(message.generator, message.incarnation)
        self._act(self._core.status(time.monotonic(), message))

    def _connect(self, generator: int, incarnation: int) -> None:
        known, socket = self._notices.get(generator, (-1, None))
        if incarnation > known:
            if socket is not None:
                socket.close(linger=0)
            me = self._run.names.of("learner", 0, self._process.incarnation)
            socket = open_socket(zmq.DEALER, self._run, "notices", generator, identity=me)
            self._notices[generator] = incarnation, socket

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Notify(generator, notice):
                    send(self._notices[generator][1], notice)
                case Rest(generator):
                    send(self._notices[generator][1], RestNotice())
                case Loaded(status, seconds):
                    self._count(count=1, total=seconds, **status.seconds)
                case LoadFailed(generator, message):
                    self._count(failed=1)

                    print(f"updater: generator {generator} failed to load: {message}", file=sys.stderr)
                case Mismatch(_, message):
                    me = f"{self._process.role}.{self._process.index}"
                    self._process.send(AlarmRaised(me, _DIFFER, message))
                    self._fail(line(_DIFFER, message))

    def _count(self, **more: float) -> None:
        # Replaced and never changed, so that the main thread reads one moment's numbers without a lock.
        self._sums = self._sums | {name: self._sums[name] + value for name, value in more.items()}

    def _fail(self, message: str) -> None:
        """Keep the failure for the main thread, and tell it to the supervisor at once: the main thread may be
        computing."""
        if self.failed is None:
            self.failed = message
            state = "\n".join(f"generator {index}: {text}" for index, text in self._core.waiting_for().items())
            self._process.send(Fatal(self._process.role, self._process.index, message, state, ends_run=True))

"""The updater in learner rank 0: a thread that owns the sockets and drives `UpdaterCore`.

    service = UpdaterService(run, process)
    service.start()
    service.publish(version, checksum, probe_ids, probe_logp)   # after every rank has committed
    service.raise_if_failed()                                   # in the main loop, and in its waits

`notices` is one PUSH per generator (a PUSH connected to several hands each message to one of them),
`weight_status` a ROUTER on which generators report. A PUSH is connected when its generator first reports: by then it
listens, and what is sent cannot go into the connection of an earlier incarnation, whose end is yet to be noticed.
A failure (weights that did not arrive as published, a load past its deadline) is kept in `failed`, raised in the main
thread, and told from the service's thread as well, so that it is known while the main thread waits or computes: to
`on_failure`, by default to the supervisor as `Fatal`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

import zmq

from rl.core.messages import Fatal, PeerDied, ProtocolError, Version, WeightStatus
from rl.core.process import Process
from rl.core.run import RunFile
from rl.core.sockets import open_socket, receive_from, send
from rl.weights.base import WeightsError, load_manifest
from rl.weights.proof import TOLERANCE
from rl.weights.updater import Action, Loaded, LoadedAll, LoadFailed, Mismatch, Notify, Suspect, UpdaterCore

_TICK_S = 0.25
_STOP_S = 5.0


class UpdaterService:
    """Methods are for the main thread; `on_failure(message)` is called in the service's thread."""

    def __init__(self, run: RunFile, process: Process, on_failure: Callable[[str], None] | None = None) -> None:
        config = run.config
        tolerance = config.weights.probe_tolerance
        self._run, self._process = run, process
        self._on_failure = on_failure or self._tell_supervisor
        self._core = UpdaterCore(
            generators=config.generator.count,
            rolling=config.rollout.alpha > 0,
            deadline_s=config.weights.deadline_s
            + (config.generator.drain_deadline_s if config.generator.on_update == "drain" else 0.0),
            tolerance=TOLERANCE[config.generator.dtype] if tolerance is None else tolerance,
            probe=config.weights.probe and config.generator.engine != "simulated",  # which has no such weights
        )
        self.failed: str | None = None
        self.loaded_all: Version | None = None
        """The newest version that every generator has had at one time."""
        self._events: queue.SimpleQueue[Callable[[float], list[Action]]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._version_bytes = 0
        self._sums = dict.fromkeys(("count", "total_s", "pause_s", "wait_s", "copy_s", "load_s", "failed"), 0.0)
        self._lock = threading.Lock()  # guards _sums
        self._notices: dict[int, tuple[int, zmq.Socket]] = {}  # generator -> incarnation and its PUSH
        self._thread = threading.Thread(target=self._serve, name="updater", daemon=True)

    def start(self) -> None:
        """Bind `weight_status` and start the thread."""
        self._status = open_socket(zmq.ROUTER, self._run, "weight_status", bind=True)
        self._thread.start()

    def publish(self, version: Version, checksum: int, probe_ids: list[int], probe_logp: list[float]) -> None:
        """Tell the generators of `version`, which all ranks have committed. Returns at once."""
        if not self._version_bytes:
            manifest = load_manifest(self._run.folder, self._run.run_id)
            self._version_bytes = manifest.total_bytes if manifest is not None else 0
        self._post(
            partial(
                self._core.publish,
                version=version,
                checksum=checksum,
                probe_ids=list(probe_ids),
                probe_logp=list(probe_logp),
            )
        )

    def peer_died(self, message: PeerDied) -> None:
        """A process was fenced; only generators matter here."""
        if message.role == "generator":
            self._post(partial(self._core.peer_died, generator=message.index, incarnation=message.incarnation))

    def raise_if_failed(self) -> None:
        """Raises WeightsError once anything has failed."""
        if self.failed is not None:
            raise WeightsError(self.failed)

    def stats(self) -> dict[str, float]:
        """Cumulative: loads and bytes, and mean seconds of a load and of its phases; `failed` counts failed loads."""
        with self._lock:
            sums = dict(self._sums)
        count = max(1.0, sums["count"])
        return {
            "count": sums["count"],
            "bytes": sums["count"] * self._version_bytes,
            "failed": sums["failed"],
            "mean_s": sums["total_s"] / count,
            "pause_mean_s": sums["pause_s"] / count,
            "wait_mean_s": sums["wait_s"] / count,
            "copy_mean_s": sums["copy_s"] / count,
            "load_mean_s": sums["load_s"] / count,
        }

    def stop(self) -> None:
        """End the thread and close the sockets; idempotent."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join(_STOP_S)

    def _post(self, event: Callable[[float], list[Action]]) -> None:
        self._events.put(event)
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
        poller = zmq.Poller()
        poller.register(self._status, zmq.POLLIN)
        poller.register(self._wake_fd, zmq.POLLIN)
        while not self._stopping:
            poller.poll(int(_TICK_S * 1000))
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            now = time.monotonic()
            while not self._events.empty():
                self._act(self._events.get()(now))
            while self._status.poll(0):
                self._receive(now)
            self._act(self._core.tick(now))

    def _receive(self, now: float) -> None:
        try:
            peer, message = receive_from(self._status)
        except ProtocolError as error:
            print(f"updater: ignored a message on weight_status: {error}", file=sys.stderr)
            return
        if isinstance(message, WeightStatus) and 0 <= message.generator < self._run.config.generator.count:
            self._connect(message.generator, message.incarnation)
            self._act(self._core.status(now, message))
        else:
            print(f"updater: ignored {type(message).__name__} from {peer!r}", file=sys.stderr)

    def _connect(self, generator: int, incarnation: int) -> None:
        known, socket = self._notices.get(generator, (-1, None))
        if incarnation > known:
            if socket is not None:
                socket.close(linger=0)
            self._notices[generator] = incarnation, open_socket(zmq.PUSH, self._run, "notices", generator)

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Notify(generator, notice):
                    send(self._notices[generator][1], notice)
                case Loaded(status, seconds):
                    self._add(status, seconds)
                case LoadedAll(version):
                    self.loaded_all = version
                case LoadFailed(generator, message):
                    with self._lock:
                        self._sums["failed"] += 1
                    print(f"updater: generator {generator} failed to load: {message}", file=sys.stderr)
                case Mismatch(_, message) | Suspect(_, _, message):
                    self._fail(message)

    def _add(self, status: WeightStatus, seconds: float) -> None:
        with self._lock:
            self._sums["count"] += 1
            self._sums["total_s"] += seconds
            for phase in ("pause_s", "wait_s", "copy_s", "load_s"):
                self._sums[phase] += getattr(status, phase)

    def _fail(self, message: str) -> None:
        if self.failed is None:
            self.failed = message
            self._on_failure(message)

    def _tell_supervisor(self, message: str) -> None:
        state = "\n".join(f"generator {index}: {text}" for index, text in self._core.waiting_for().items())
        self._process.send(Fatal(self._process.role, self._process.index, message, state))

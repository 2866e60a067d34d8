"""A channel of somebody else's, complete: `weights.transport=tests.rl.weights.gloo_channel:GLOO` (one machine).

Every rank of the learner keeps copies of its newest parts. Receivers ask in a store. Rank 0 answers all who ask at one
moment with a session: each rank of the learner makes a gloo group with them, and broadcasts its part. Whoever dies
breaks the session, not the channel: the others ask again.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistStoreError, PrefixStore, ProcessGroupGloo, Store, TCPStore

from rl.weights.channel import Channel, Piece, Receiver, Sender, label
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile

HOST = "127.0.0.1"
KEPT = 3  # versions: a session may go on while the next ones are offered
SESSION_S = 10.0  # longest standstill of one: then it is broken, and all of it ask again
TICK = timedelta(seconds=0.1)


class GlooSender(Sender):
    def open(self) -> None:
        self._kept: dict[int, list[tuple[str, int, Tensor]]] = {}  # by n: name, first element, elements
        self._announced = Version(-1, -1)
        self._dead: dict[str, int] = {}  # generator -> incarnation
        self._waiting: dict[int, list[Any]] = {}  # by ask: timeline, n, receiver, incarnation
        self._seen = 0  # asks
        self._stopping = False
        if self.rank == 0:
            self._store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
            self._store.set("entries", json.dumps(self.entries))
            port = self.run.folder / "gloo.port"
            port.with_suffix(".new").write_text(str(self._store.port))
            os.replace(port.with_suffix(".new"), port)
        else:
            self._store = self.wait("rank 0's store", lambda seconds: _connected(self.run, seconds))
        self._thread = threading.Thread(target=self._serve, name="gloo", daemon=True)
        self._thread.start()

    def offer(self, n: int, pieces: Iterable[Piece]) -> None:
        dtypes = {name: getattr(torch, dtype) for name, _, dtype in self.entries}
        part = []
        for name, local, placement in pieces:
            first = placement.row * (torch.Size(placement.shape[1:]).numel() if placement.shape else 1)
            part.append((name, first, torch.as_tensor(local).detach().to("cpu", dtypes[name], copy=True).reshape(-1)))
        self._kept[n] = part
        for old in sorted(self._kept)[:-KEPT]:
            del self._kept[old]
        table = [(name, first, elements.numel()) for name, first, elements in part if elements.numel()]
        self._store.set(f"offered/{n}/{self.rank}", json.dumps(table))

    def receipt(self, n: int) -> None:
        offered = [f"offered/{n}/{rank}" for rank in range(self.run.config.learner.ranks)]
        self.wait("other ranks' part", lambda seconds: _wait(self._store, offered, seconds))

    def announce(self, version: Version) -> None:
        self._announced = version

    def receiver_died(self, name: str, incarnation: int) -> None:
        self._dead[name] = incarnation

    def close(self) -> None:
        if hasattr(self, "_thread"):
            self._stopping = True
            self._thread.join(SESSION_S)

    def _serve(self) -> None:
        store = _connected(self.run, SESSION_S)  # its own: a wait in it must not hold up `offer`
        session = 0
        while not self._stopping:
            if self.rank == 0:
                self._begin(store, session)
            try:
                store.wait([f"session/{session}"], TICK)
            except DistStoreError:
                continue

            plan = json.loads(store.get(f"session/{session}"))
            try:
                group = _group(store, session, self.rank, 0, len(plan["asks"]))
                for _, _, elements in self._kept[plan["n"]]:
                    if elements.numel():
                        group.broadcast(elements, 0).wait()
            except (RuntimeError, KeyError):
                pass  # one of them died, or the version is too old by now: the others ask again
            session += 1

    def _begin(self, store: Store, session: int) -> None:
        """Rank 0: a session for all who wait for what is announced, if there are any."""
        for ask in range(self._seen, store.add("asks", 0)):
            self._waiting[ask] = json.loads(store.get(f"ask/{ask}"))
            self._seen = ask + 1

        version = self._announced
        due = [ask for ask, (timeline, n, *_) in self._waiting.items() if Version(timeline, n) <= version]
        asks = [(ask, self._waiting.pop(ask)) for ask in due]
        alive = [
            ask for ask, (_, _, name, incarnation) in asks if incarnation > self._dead.get(name.rpartition("-")[0], -1)
        ]
        if alive:
            plan = {"timeline": version.timeline, "n": version.n, "asks": alive}
            store.set(f"session/{session}", json.dumps(plan))
            for ask in alive:
                store.set(f"answer/{ask}", str(session))


class GlooReceiver(Receiver):
    def take(self, at_least: Version, deadline_s: float) -> tuple[Version, Iterable[tuple[str, Tensor]]]:
        seen = self.progress
        until = time.monotonic() + deadline_s
        while True:
            try:
                return self._receive(at_least, until - time.monotonic())
            except (RuntimeError, OSError, ValueError) as error:  # the session broke, or the learner is away
                if self.progress != seen:
                    seen = self.progress
                    until = time.monotonic() + deadline_s
                if time.monotonic() > until:
                    raise WaitExpired(f"{self.name} waits for weights {label(at_least)} or newer: {error}") from None
            time.sleep(0.05)

    def _receive(self, at_least: Version, seconds: float) -> tuple[Version, Iterable[tuple[str, Tensor]]]:
        """By one session. Raises RuntimeError (also DistStoreError), OSError or ValueError if there is none."""
        store = _connected(self.run, seconds)
        ask = store.add("asks", 1) - 1
        store.set(f"ask/{ask}", json.dumps([at_least.timeline, at_least.n, self.name, self.incarnation]))
        store.wait([f"answer/{ask}"], timedelta(seconds=seconds))
        session = int(store.get(f"answer/{ask}"))
        plan = json.loads(store.get(f"session/{session}"))

        entries = json.loads(store.get("entries"))
        tensors = {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, shape, dtype in entries}
        for rank in range(self.run.config.learner.ranks):
            group = _group(store, session, rank, 1 + plan["asks"].index(ask), len(plan["asks"]))
            for name, first, count in json.loads(store.get(f"offered/{plan['n']}/{rank}")):
                elements = tensors[name].view(-1)[first : first + count]
                group.broadcast(elements, 0).wait()
                self.progress += elements.nbytes
        return Version(plan["timeline"], plan["n"]), tensors.items()


GLOO = Channel(GlooSender, GlooReceiver)


def _wait(store: Store, keys: list[str], seconds: float) -> None:
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except DistStoreError:
        raise WaitExpired(f"{', '.join(keys)} are not all there") from None


def _connected(run: RunFile, seconds: float) -> TCPStore:
    """Raises WaitExpired while rank 0 has no store yet, or the one of before."""
    try:
        port = int((run.folder / "gloo.port").read_text())
        return TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=seconds))
    except (OSError, RuntimeError) as error:
        time.sleep(min(0.05, seconds))
        raise WaitExpired(f"no store of rank 0 ({error})") from None


def _group(store: Store, session: int, sender: int, rank: int, receivers: int) -> Any:
    """Of one rank of the learner and all receivers of a session."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=HOST)]
    options._timeout = timedelta(seconds=SESSION_S)
    return gloo(PrefixStore(f"group/{session}/{sender}", store), rank, 1 + receivers, options)

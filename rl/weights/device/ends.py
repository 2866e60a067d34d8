"""The two ends of a channel from device to device: what `nccl` and `ipc` have in common.

    rank r of the learner                                      rank k of an engine
    offer: its rows, cast and packed; `weights.slots` of them
    a thread for each line       ◀── ask ── answer ──▶         take: a line has a number, and a link with each r

A store carries names, tables, asks and digests; a subclass says how the rows themselves come over. A receiver that dies
or stands still holds up nobody: its line ends by its word, by the supervisor's or by `weights.deadline_s`, and a
successor opens another one. Digests are made where the bytes are; the receipt compares them before the engine pauses.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from rl.weights.channel import Piece, Receiver, Sender, WeightsCorrupt, WeightsError, label
from rl.weights.device.line import Line, offered
from rl.weights.device.link import Link, connected, meet
from rl.weights.device.packing import Table, combined, device_digest, layout, places
from rl.weights.host.ends import wait_for
from rl.wire.messages import Version
from rl.wire.process import WaitExpired

_TICK_S = 0.01
_STOP_S = 2.0


class DeviceSender(Sender):
    _store: Store
    _is_open = False

    def open(self) -> None:
        self._spare: list[Tensor] = []  # parts without a version yet
        self._parts: dict[int, Tensor] = {}  # by number of the offer
        self._offers: dict[int, int] = {}  # n -> number of its last offer: an undo offers some once more
        self._sending: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._table: Table = []
        self._announced = Version(-1, -1), -1  # and its offer
        self._dead: dict[str, int] = {}  # engine -> incarnation
        self._stopping = False
        self._device = torch.device("cpu")
        if self.run.learner_device == "cuda":
            self._device = torch.device("cuda", torch.cuda.current_device())

        if self.rank == 0:
            self._meeting, self._store = meet(self.run)
            self._store.set("entries", json.dumps(self.entries))
        else:
            who = f"learner rank {self.rank}"
            _, self._store = self.wait("rank 0's store", lambda seconds: connected(self.run, seconds, who))
        self._threads = [threading.Thread(target=self._listen, name="weight lines", daemon=True)]
        self._threads[0].start()
        self._is_open = True

    def offer(self, n: int, pieces: Iterable[Piece]) -> None:
        if not self._table:
            pieces = list(pieces)
            self._table = self._tabled(pieces)
            self._spare = self._new_parts(layout(self._table).total_bytes)
            self._store.set(f"table/{self.rank}", json.dumps(self._table))

        part = self.wait("slot", lambda seconds: wait_for(self._room, seconds, self._blockers))
        packed = zip(self._table, places(self._table, part), strict=True)
        due = {(name, row): place for (name, row, _, _), place in packed}
        for name, local, placement in pieces:
            if 0 not in local.shape:
                due.pop((name, placement.row)).copy_(torch.as_tensor(local).detach())
        if due:
            raise WeightsError(f"version {n} of rank {self.rank} lacks what the first one had: {sorted(due)[:3]}")

        found = device_digest(part)  # which also waits for the copies
        number = max(self._offers.values(), default=-1) + 1  # the same on all ranks, which offer in one order
        with self._lock:
            self._parts[number] = part
            self._offers[n] = number
        self._store.set(f"offered/{number}/{self.rank}", str(found))

    def receipt(self, n: int) -> int:
        keys = offered(self.run, self._offers[n])

        def waiting() -> str:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            return f"learner rank {self.rank} waits for rank {', '.join(missing)} to offer version {n}"

        def ask(seconds: float) -> bool:
            return wait_for(lambda: self._store.check(keys) or None, seconds, waiting)

        self.wait("other ranks' part", ask)
        return combined(int(self._store.get(key)) for key in keys)

    def announce(self, version: Version) -> None:
        self._announced = version, self._offers[version.n]

    def receiver_died(self, name: str, incarnation: int) -> None:
        self._dead[name] = incarnation

    def close(self) -> None:
        if self._is_open:
            self._stopping = True
            for thread in self._threads:
                thread.join(_STOP_S)  # each looks at the store while it is there
            if self.rank == 0:
                self._meeting.close()
            self._parts.clear()
            self._spare.clear()
        self._is_open = False

    @abstractmethod
    def _new_parts(self, nbytes: int) -> list[Tensor]:
        """Zeros on the device for the rows of `weights.slots` versions: all at once, before others take the memory."""

    @abstractmethod
    def _give(self, link: Link, ask: str, part: Tensor | None) -> None:
        """Rows to the other side of `link`, which asked; None: they are gone. Until it returns or raises, `part` stays
        as it is."""

    def _tabled(self, pieces: Iterable[Piece]) -> Table:
        dtypes = {name: dtype for name, _, dtype in self.entries}
        return [
            (name, place.row, tuple(local.shape), dtypes[name]) for name, local, place in pieces if 0 not in local.shape
        ]

    def _room(self) -> Tensor | None:
        """A part to write into: never the newest one, which may be announced, nor one that is being sent."""
        with self._lock:
            if self._spare:
                return self._spare.pop()
            free = [number for number in sorted(self._parts)[:-1] if not self._sending[number]]
            return self._parts.pop(free[0]) if free else None

    def _blockers(self) -> str:
        sent = [n for n, number in self._offers.items() if self._sending[number]]
        return f"learner rank {self.rank} waits for a weight slot: version {sorted(sent)} is being sent"

    def _listen(self) -> None:
        """A thread for each line that is opened."""
        line = 0
        while not self._stopping:
            if self._store.check([f"line/{line}"]):
                name, incarnation = json.loads(self._store.get(f"line/{line}"))
                arguments = line, name, incarnation
                thread = threading.Thread(target=self._serve, args=arguments, name=f"weights to {name}", daemon=True)
                thread.start()
                self._threads.append(thread)
                line += 1
            else:
                time.sleep(_TICK_S)

    def _serve(self, line: int, name: str, incarnation: int) -> None:
        """Until the line's end."""

        def check() -> None:
            dead = self._dead.get(name.rpartition("-")[0], -1) >= incarnation
            if self._stopping or dead or self._store.check([f"over/{line}"]):
                raise _Over

        link = Link(self.run, PrefixStore(f"group/{line}/{self.rank}", self._store), 0, self._device, check)
        try:
            for number in itertools.count():
                ask = f"{line}/{number}"
                self._send(link, ask, self._answer(link, ask))
        except _Over:
            pass
        except Exception as error:  # it stood still, or broke off: it opens another line
            print(f"weights: the line to {name} broke: {error}", file=sys.stderr, flush=True)
        finally:
            link.close()

    def _answer(self, link: Link, ask: str) -> int:
        """The offer that this ask is answered with; on rank 0 it is chosen."""
        if self.rank == 0:
            link.wait_for(lambda: self._store.check([f"ask/{ask}"]))
            at_least = Version(*json.loads(self._store.get(f"ask/{ask}")))
            link.wait_for(lambda: self._announced[0] >= at_least)
            version, offer = self._announced
            self._store.set(f"answer/{ask}", json.dumps([version.timeline, version.n, offer]))

        link.wait_for(lambda: self._store.check([f"answer/{ask}"]))
        number: int = json.loads(self._store.get(f"answer/{ask}"))[-1]
        return number

    def _send(self, link: Link, ask: str, number: int) -> None:
        with self._lock:
            part = self._parts.get(number)
            self._sending[number] += part is not None
        try:
            self._give(link, ask, part)
        finally:
            with self._lock:
                self._sending[number] -= part is not None


class DeviceReceiver(Receiver):
    line: ClassVar[type[Line]]
    _line: Line | None = None
    _version = Version(-1, -1)

    def take(self, at_least: Version, deadline_s: float) -> tuple[Version, Iterable[tuple[str, Tensor]]]:
        seen = self.progress
        until = time.monotonic() + deadline_s
        why = ""  # since it last came further
        while True:
            try:
                self._line = self._line or self.line(self.run, self.name, self.incarnation, self.device, _until(until))
                self._version = self._line.receive(at_least, _until(until), self._advance)
                return self._version, self._line.tensors()

            except (RuntimeError, OSError, ValueError) as error:  # the line broke, or the learner is away
                if isinstance(error, WeightsError):
                    raise

                self.close()
                if self.progress != seen:
                    seen = self.progress
                    until = time.monotonic() + deadline_s
                    why = ""
                why = why or str(error)
                if time.monotonic() > until:
                    raise WaitExpired(f"{self.name} waits for weights {label(at_least)} or newer: {why}") from None
            time.sleep(_TICK_S)

    def receipt(self) -> int:
        assert self._line is not None
        try:
            return self._line.verified()
        except WeightsCorrupt as error:
            raise WeightsCorrupt(f"{self.name}, version {label(self._version)}: {error}") from None

    def release(self) -> bool:
        assert self._line is not None
        intact = self._line.release()
        if not intact:
            self.close()  # the sender has given this line up
        return intact

    def close(self) -> None:
        if self._line is not None:
            self._line.close()
        self._line = None

    def _advance(self, count: int) -> None:
        self.progress += count


def _until(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


class _Over(Exception):
    """A line has come to its orderly end."""

"""An engine's end of a line: a number, and a link with each rank of the learner."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from rl.weights.channel import Entry, WeightsCorrupt, WeightsError
from rl.weights.device.link import Link, connected, meeting_place
from rl.weights.device.packing import Table, combined, device_digest, places
from rl.wire.messages import Version
from rl.wire.run import RunFile


class Line(ABC):
    """An engine's end of a line, to one incarnation of the learner."""

    def __init__(self, run: RunFile, name: str, incarnation: int, device: str, deadline_s: float) -> None:
        self._place, self._store = connected(run, deadline_s, name)
        self._run = run
        self._device = torch.device(device)
        self._number = self._store.add("lines", 1) - 1
        self._store.set(f"line/{self._number}", json.dumps([name, incarnation]))
        self._links = [
            Link(run, PrefixStore(f"group/{self._number}/{rank}", self._store), 1, self._device, self._check)
            for rank in range(run.config.learner.ranks)
        ]

        self._asks = itertools.count()
        self._entries: list[Entry] = []  # known once a version has come, as is what each rank has of it
        self._tables: list[Table] = []
        self._parts: list[Tensor] = []
        self._digests: list[int] = []

    def receive(self, at_least: Version, deadline_s: float, advance: Callable[[int], None]) -> Version:
        """The newest version. Raises RuntimeError where the line breaks, WeightsError for rows that are no version."""
        ask = f"{self._number}/{next(self._asks)}"
        self._store.set(f"ask/{ask}", json.dumps([at_least.timeline, at_least.n]))
        self._links[0].wait_for(lambda: self._store.check([f"answer/{ask}"]), deadline_s)
        timeline, n, number = json.loads(self._store.get(f"answer/{ask}"))
        version = Version(timeline, n)
        if not self._tables:
            self._agree()

        self._digests = [int(self._store.get(key)) for key in offered(self._run, number)]
        self._parts = [self._part(rank, ask, version, advance) for rank in range(len(self._links))]
        return version

    def verified(self) -> int:
        """The checksum of what came last. Raises WeightsCorrupt."""
        for rank, (part, sent) in enumerate(zip(self._parts, self._digests, strict=True)):
            if device_digest(part) != sent:
                raise WeightsCorrupt(f"the rows of rank {rank} differ from what the learner sent")
        return combined(self._digests)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole ones; those that several ranks have are put together as they are read."""
        rows = defaultdict(list)
        for table, part in zip(self._tables, self._parts, strict=True):
            for (name, row, _, _), place in zip(table, places(table, part), strict=True):
                rows[name].append((row, place))

        for name, shape, dtype in self._entries:
            found = [place for _, place in sorted(rows[name], key=lambda each: each[0])]
            if len(found) > 1:
                yield name, torch.cat(found)
            else:
                yield name, found[0] if found else torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def release(self) -> bool:
        """The rows have been read. False: they changed meanwhile."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the copies have been made, and not only begun
        return True

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may go with the learner
            if self._learner_lives():
                self._store.set(f"over/{self._number}", "")
        for link in self._links:
            link.close()

    def _check(self) -> None:
        if not self._learner_lives():
            raise RuntimeError("the learner has gone")

    def _learner_lives(self) -> bool:
        return meeting_place(self._run) == self._place

    def _agree(self) -> None:
        """Ask what there is, and what each rank sends, which is whole tensors together. Raises WeightsError."""
        entries = json.loads(self._store.get("entries"))
        self._entries = [(name, tuple(shape), dtype) for name, shape, dtype in entries]
        self._tables = [json.loads(self._store.get(f"table/{rank}")) for rank in range(len(self._links))]
        elements: Counter[str] = Counter()
        for name, _, shape, _ in itertools.chain(*self._tables):
            elements[name] += math.prod(shape)

        for name, shape, _ in self._entries:
            if elements[name] != math.prod(shape):
                raise WeightsError(f"tensor {name!r}: the ranks send {elements[name]} elements of {math.prod(shape)}")

    @abstractmethod
    def _part(self, rank: int, ask: str, version: Version, advance: Callable[[int], None]) -> Tensor:
        """A rank's rows of the version that `ask` was answered with. Raises RuntimeError where they do not come."""


def offered(run: RunFile, number: int) -> list[str]:
    """Where each rank of the learner says that it has made this offer, and the digest of its rows."""
    return [f"offered/{number}/{rank}" for rank in range(run.config.learner.ranks)]

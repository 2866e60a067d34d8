"""An engine's end of a line: a number, and a link with each rank of the learner."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from rl.weights.channel import Entry, WeightsCorrupt, WeightsError, label
from rl.weights.device.link import Link, connected, meeting_place
from rl.weights.device.packing import Table, combined, device_digest, layout, places
from rl.wire.messages import Version
from rl.wire.run import RunFile

BUCKET_BYTES = 256 << 20


class Line:
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
        self._parts: list[tuple[Table, Tensor]] = []  # of each rank, once a version has come
        self._digests: list[int] = []

    def receive(self, at_least: Version, deadline_s: float, advance: Callable[[int], None]) -> Version:
        """The newest version. Raises RuntimeError where the line breaks, WeightsError for rows that are no version."""
        ask = f"{self._number}/{next(self._asks)}"
        self._store.set(f"ask/{ask}", json.dumps([at_least.timeline, at_least.n]))
        self._links[0].wait_for(lambda: self._store.check([f"answer/{ask}"]), deadline_s)
        version = Version(*json.loads(self._store.get(f"answer/{ask}")))
        if not self._parts:
            self._parts = list(self._room())

        keys = offered(self._run, version.n)
        self._digests = [int(self._store.get(key)) for key in keys]
        for rank, (link, (_, part)) in enumerate(zip(self._links, self._parts, strict=True)):
            header = torch.zeros(1, dtype=torch.int64, device=self._device)
            link.transfer(header)
            if header.item() != version.n:
                raise RuntimeError(f"rank {rank} of the learner no longer has version {label(version)}")
            for bucket in part.split(BUCKET_BYTES):
                link.transfer(bucket)
                advance(bucket.nbytes)
        return version

    def verified(self) -> int:
        """The checksum of what came last. Raises WeightsCorrupt."""
        for rank, ((_, part), sent) in enumerate(zip(self._parts, self._digests, strict=True)):
            if device_digest(part) != sent:
                raise WeightsCorrupt(f"the rows of rank {rank} differ from what the learner sent")
        return combined(self._digests)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Whole ones; those that several ranks have are put together as they are read."""
        rows = defaultdict(list)
        for table, part in self._parts:
            for (name, row, _, _), place in zip(table, places(table, part), strict=True):
                rows[name].append((row, place))

        for name, shape, dtype in self._entries():
            found = [place for _, place in sorted(rows[name], key=lambda each: each[0])]
            if len(found) > 1:
                yield name, torch.cat(found)
            else:
                yield name, found[0] if found else torch.empty(shape, dtype=getattr(torch, dtype), device=self._device)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may go with the learner
            if meeting_place(self._run) == self._place:
                self._store.set(f"over/{self._number}", "")
        for link in self._links:
            link.close()

    def _check(self) -> None:
        if meeting_place(self._run) != self._place:
            raise RuntimeError("the learner has gone")

    def _entries(self) -> list[Entry]:
        return [(name, tuple(shape), dtype) for name, shape, dtype in json.loads(self._store.get("entries"))]

    def _room(self) -> Iterator[tuple[Table, Tensor]]:
        """What each rank sends, and where it is received."""
        elements: Counter[str] = Counter()
        for rank in range(len(self._links)):
            table = json.loads(self._store.get(f"table/{rank}"))
            elements.update({name: 0 for name, *_ in table})
            for name, _, shape, _ in table:
                elements[name] += math.prod(shape)
            yield table, torch.zeros(layout(table).total_bytes, dtype=torch.uint8, device=self._device)

        for name, shape, _ in self._entries():
            if elements[name] != math.prod(shape):
                raise WeightsError(f"tensor {name!r}: the ranks send {elements[name]} elements of {math.prod(shape)}")


def offered(run: RunFile, n: int) -> list[str]:
    """Where each rank of the learner says that it has offered version `n`, and the digest of its rows."""
    return [f"offered/{n}/{rank}" for rank in range(run.config.learner.ranks)]

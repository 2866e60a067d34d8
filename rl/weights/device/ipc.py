"""Channel `ipc`: learner and engine on one GPU. The engine reads the learner's packed rows where they are.

    offer: rows, cast and packed into one of `weights.slots` blocks (`rl.weights.device.blocks`)
    take: a lease of a block, which is mapped and proven while generation goes on
    load: one copy within the device, and then `release`, which ends both

The optimizer writes in place, so the blocks stand beside the parameters. None is written while it is leased. A lease
has one end: that of whoever counts first, the receiver by `release` or the sender, which gives the line up
(`rl.weights.device.ends`). So a receiver knows when its bytes may have changed. Those of a sender that died are proven
once more. Nothing is mapped between two loads: a mapping may keep the memory of a dead learner, whose successor needs
the room.

On a CPU the blocks are files without a name, and all else is the same: so it is tested. **No GPU has run it.**
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence

from torch import Tensor

from rl.weights.channel import Channel, WeightsCorrupt, WeightsError, label
from rl.weights.device.blocks import Block, Handle, make_block, map_block
from rl.weights.device.ends import DeviceReceiver, DeviceSender
from rl.weights.device.line import Line
from rl.weights.device.link import Link
from rl.weights.device.packing import device_digest
from rl.weights.host.ends import wait_for
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile

_DYING_S = 5.0
"""By then the lock of a learner whose memory on the device has gone is gone as well."""


class IpcSender(DeviceSender):
    _blocks: Sequence[Block] = ()

    def close(self) -> None:
        super().close()
        for block in self._blocks:
            block.close()
        self._blocks = ()

    def _new_parts(self, nbytes: int) -> list[Tensor]:
        self._blocks = [make_block(nbytes, self._device) for _ in range(self.run.config.weights.slots)]
        for number, block in enumerate(self._blocks):
            self._store.set(f"block/{self.rank}/{number}", json.dumps(block.handle))
        return [block.data for block in self._blocks]

    def _give(self, link: Link, ask: str, part: Tensor | None) -> None:
        number = next((number for number, block in enumerate(self._blocks) if block.data is part), -1)
        self._store.set(f"lease/{ask}/{self.rank}", str(number))
        if part is None:
            return

        end = _end(ask, self.rank)
        try:
            link.wait_for(lambda: self._store.check([end]), self.run.config.weights.deadline_s)
        finally:
            self._store.add(end, 1)


class IpcLine(Line):
    _ask = ""  # under which the blocks are leased

    def __init__(self, run: RunFile, name: str, incarnation: int, device: str, deadline_s: float) -> None:
        super().__init__(run, name, incarnation, device, deadline_s)
        self._blocks: list[Block] = []  # that are mapped

    def _part(self, rank: int, ask: str, version: Version, advance: Callable[[int], None]) -> Tensor:
        self._ask = ask
        answer = f"lease/{ask}/{rank}"
        self._links[rank].wait_for(lambda: self._store.check([answer]), self._run.config.weights.deadline_s)
        number = int(self._store.get(answer))
        if number < 0:
            raise RuntimeError(f"rank {rank} of the learner no longer has version {label(version)}")

        handle = Handle(*json.loads(self._store.get(f"block/{rank}/{number}")))
        block = self._mapped(handle)
        self._blocks.append(block)
        advance(handle.nbytes)
        return block.data

    def _mapped(self, handle: Handle) -> Block:
        """Raises WeightsError where a learner that lives has memory that cannot be mapped: nothing will change that."""
        try:
            return map_block(handle, self._device)
        except RuntimeError as error:
            if isinstance(error, WeightsError):
                raise
            with contextlib.suppress(WaitExpired):
                wait_for(lambda: not self._learner_lives() or None, _DYING_S, lambda: "a learner that may be dying")
                raise
            why = f"the engine cannot map the learner's memory ({error})"
            raise WeightsError(f"weights.transport=ipc: {why}; set weights.transport=shm") from None

    def verified(self) -> int:
        """0 where the lease has ended, which `release` then tells."""
        try:
            return super().verified()
        except WeightsCorrupt:
            if self._learner_lives() and not any(self._store.check([end]) for end in self._ends()):
                raise
        return 0

    def release(self) -> bool:
        super().release()
        try:
            if not self._learner_lives():  # a GPU may take back what a dead process had
                return all(device_digest(part) == sent for part, sent in zip(self._parts, self._digests, strict=True))
            counts = [self._store.add(end, 1) for end in self._ends()]
            return max(counts) == 1
        finally:
            self._unmap()

    def close(self) -> None:
        super().close()
        self._unmap()

    def _unmap(self) -> None:
        self._parts.clear()
        while self._blocks:
            self._blocks.pop().close()

    def _ends(self) -> list[str]:
        return [_end(self._ask, rank) for rank in range(len(self._links))]


class IpcReceiver(DeviceReceiver):
    line = IpcLine


def _end(ask: str, rank: int) -> str:
    """What counts how often the lease of this ask was ended."""
    return f"end/{ask}/{rank}"


IPC = Channel(IpcSender, IpcReceiver)

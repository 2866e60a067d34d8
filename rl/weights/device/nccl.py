"""Channel `nccl`: every rank of the learner sends its own rows to every rank of an engine, from device to device.

A link (`rl.weights.device.ends`) is a group of two, so no group has two receivers. Whether the packed rows are still
there goes ahead of them. They are received into a buffer beside the model.

Where engines are on a CPU the backend is gloo, and all else is the same: so it is tested. **No GPU has run it.** An
engine's device needs room for one more version; NCCL refuses two ranks on one device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rl.weights.channel import Channel, label
from rl.weights.device.ends import DeviceReceiver, DeviceSender
from rl.weights.device.line import Line
from rl.weights.device.link import Link
from rl.weights.device.packing import layout
from rl.wire.messages import Version

_BUCKET_BYTES = 256 << 20


class NcclSender(DeviceSender):
    def _new_parts(self, nbytes: int) -> list[Tensor]:
        return list(torch.zeros(self.run.config.weights.slots, nbytes, dtype=torch.uint8, device=self._device))

    def _give(self, link: Link, ask: str, part: Tensor | None) -> None:
        link.transfer(torch.tensor([part is not None], device=self._device))
        for bucket in () if part is None else part.split(_BUCKET_BYTES):
            link.transfer(bucket)


class NcclLine(Line):
    def _part(self, rank: int, ask: str, version: Version, advance: Callable[[int], None]) -> Tensor:
        header = torch.zeros(1, dtype=torch.bool, device=self._device)
        self._links[rank].transfer(header)
        if not header.item():
            raise RuntimeError(f"rank {rank} of the learner no longer has version {label(version)}")

        part = self._parts[rank] if self._parts else self._buffer(rank)
        for bucket in part.split(_BUCKET_BYTES):
            self._links[rank].transfer(bucket)
            advance(bucket.nbytes)
        return part

    def _buffer(self, rank: int) -> Tensor:
        return torch.zeros(layout(self._tables[rank]).total_bytes, dtype=torch.uint8, device=self._device)


class NcclReceiver(DeviceReceiver):
    line = NcclLine


NCCL = Channel(NcclSender, NcclReceiver)

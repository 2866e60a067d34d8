"""A receiver in a process of its own, on a machine of its own, that says whether what it took is right.

It imports little, for each of the many processes of a test begins with this.
"""

from __future__ import annotations

import os
import signal
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

import torch

from rl.weights import make_receiver
from rl.weights.channel import Entry, Receiver
from rl.weights.host.shm_file import SlotsFile
from rl.weights.host.tcp import TcpReceiver
from rl.wire.messages import Version
from rl.wire.run import RunFile

ENTRIES: list[Entry] = [
    ("embed", (301, 64), "bfloat16"),
    ("norm", (7,), "float32"),
    ("scalar", (), "float32"),
    *((f"layer.{i}", (97, 65), "bfloat16") for i in range(8)),
]


@cache
def content(n: int) -> dict[str, torch.Tensor]:
    """Of each version: most steps change little, every seventh much, every eleventh all, every thirteenth nothing."""
    if n == 0:
        return {name: torch.randn(shape, generator=torch.Generator().manual_seed(7)) for name, shape, _ in ENTRIES}
    made = torch.Generator().manual_seed(n)
    share = 0 if n % 13 == 0 else 1 if n % 11 == 0 else 0.5 if n % 7 == 0 else 0.02
    return {
        name: whole + 0.01 * whole.abs() * (torch.rand(whole.shape, generator=made) < share)
        for name, whole in content(n - 1).items()
    }


def is_right(tensors: Any, n: int) -> bool:
    """To the bit."""
    expected = content(n)
    arrived = dict(tensors)
    dtypes = {name: getattr(torch, dtype) for name, _, dtype in ENTRIES}
    return set(arrived) == set(expected) and all(
        torch.equal(arrived[name].view(torch.uint8), expected[name].to(dtype).view(torch.uint8))
        if expected[name].ndim
        else torch.equal(arrived[name], expected[name])
        for name, dtype in dtypes.items()
    )


def on_machine(folder: str, machine: int, endpoints: dict[str, str]) -> RunFile:
    run = RunFile.load(folder)
    run.addresses.host = f"127.0.0.{machine}"
    run.addresses.give(endpoints)
    return run


class Dying(TcpReceiver):
    """It is killed when so many bytes of a fetch are there."""

    left = 0

    def _advance(self, slots: SlotsFile, nbytes: int) -> None:
        super()._advance(slots, nbytes)
        self.left -= nbytes
        if nbytes and self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def follow(
    folder: str, machine: int, name: str, incarnation: int, endpoints: Any, dies: int, asked: Connection
) -> None:
    run = on_machine(folder, machine, endpoints)
    receiver: Receiver = make_receiver(run, name, incarnation)
    if dies:
        receiver = Dying(run, name, incarnation)
        receiver.left = dies
    while (at_least := asked.recv()) is not None:
        version, tensors = receiver.take(Version(0, at_least), 30)
        receipt = receiver.receipt()
        asked.send((version.n, receipt, is_right(tensors, version.n)))
        receiver.release()
    receiver.close()

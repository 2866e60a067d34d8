"""Channels from device to device, on a CPU and over processes: versions arrive proven; who dies holds up nobody."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch

from rl.weights import make_receiver, make_sender
from rl.weights.channel import Entry, Placement, Sender, WeightsCorrupt, WeightsError
from rl.weights.device.ends import DeviceReceiver, DeviceSender
from rl.weights.device.ipc import IpcReceiver
from rl.weights.device.packing import device_digest
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.copies import COPIES
from tests.rl.weights.offering import offer_rows

RANKS = 2
ENTRIES: list[Entry] = [
    ("embed", (301, 16), "bfloat16"),
    ("scalar", (), "float32"),
    ("none", (0, 3), "float32"),
    ("norm", (7,), "float32"),
]
CHANNELS = ["nccl", "ipc"]


def content(n: int) -> dict[str, torch.Tensor]:
    """Whole numbers that every dtype holds, other ones for each version, tensor and row."""
    numbered = enumerate(ENTRIES)
    return {
        name: (torch.arange(math.prod(shape)).remainder(5) + 8 * n + place).float().view(shape)
        for place, (name, shape, _) in numbered
    }


def offer(senders: list[Sender], n: int) -> int | None:
    return offer_rows(senders, n, content(n))


def follow(folder: str, name: str, incarnation: int, halts: int, device: str, asked: Connection) -> None:
    """Takes what is asked for, as (timeline, n), and answers its version, whether it is right, and its receipt.

    `halts`: the signal that ends or stops it in the middle of its first update, or 0.
    """
    receiver: Any = make_receiver(RunFile.load(folder), name, incarnation, device)
    if halts:
        receiver._advance = lambda count: os.kill(os.getpid(), halts)
    while True:
        try:
            at_least = asked.recv()
        except EOFError:  # the end of the test
            break

        version, tensors = receiver.take(Version(*at_least), 60)
        receipt = receiver.receipt()
        arrived = {name: tensor.cpu() for name, tensor in tensors}
        right = all(torch.equal(arrived[name].float(), whole) for name, whole in content(version.n).items())
        dtypes = [str(arrived[name].dtype) for name, _, _ in ENTRIES] == [f"torch.{dtype}" for *_, dtype in ENTRIES]
        assert receiver.release()
        asked.send((version.n, right and dtypes, receipt))
    receiver.close()


def lead(folder: str, first: int, heard: Connection) -> None:
    """All ranks of a learner in one process, which offers a version whenever it is told to."""
    run = RunFile.load(folder)
    senders = [make_sender(run, rank, ENTRIES) for rank in range(run.config.learner.ranks)]
    for sender in senders:
        sender.open()
    while True:
        heard.send(offer(senders, first))
        heard.recv()
        first += 1


class Other:
    """A process, and the way to talk with it."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = COPIES.Pipe()
        self.process = COPIES.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()

    def answer(self) -> Any:
        assert self.pipe.poll(120)
        return self.pipe.recv()


def follower(run: RunFile, index: int, incarnation: int = 0, halts: int = 0, device: str = "cpu") -> Other:
    return Other(follow, str(run.folder), f"generator-{index}-0", incarnation, halts, device)


def settings(channel: str) -> tuple[str, ...]:
    return f"weights.transport={channel}", f"learner.ranks={RANKS}"


@pytest.fixture(params=CHANNELS)
def channel(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(make_run: MakeRun, channel: str) -> RunFile:
    return make_run(*settings(channel), "weights.deadline_s=60")


@pytest.fixture
def senders(run: RunFile) -> Iterator[list[Sender]]:
    made = [make_sender(run, rank, ENTRIES) for rank in range(RANKS)]
    for sender in made:
        sender.open()
    yield made
    for sender in reversed(made):
        sender.close()


@pytest.fixture
def receiver(run: RunFile) -> Iterator[DeviceReceiver]:
    made = make_receiver(run, "generator-0-0", 0)
    assert isinstance(made, DeviceReceiver)
    yield made
    made.close()


def test_the_newest_version_arrives_cast_and_with_the_senders_checksum(
    senders: list[Sender], receiver: DeviceReceiver
) -> None:
    receipts = [offer(senders, n) for n in range(2)]
    for n in range(2, 6):
        receipts.append(offer(senders, n))
        version, tensors = receiver.take(Version(0, n - 1), 30)
        assert version == Version(0, n) and receiver.receipt() == receipts[n]
        arrived = dict(tensors)
        assert list(arrived) == [name for name, *_ in ENTRIES] and arrived["embed"].dtype == torch.bfloat16
        assert all(torch.equal(arrived[name].float(), whole) for name, whole in content(n).items())
        assert receiver.release()
    assert len(set(receipts)) == 6 and receiver.progress > 4 * 301 * 16 * 2


def test_versions_that_are_offered_again_after_an_undo(senders: list[Sender], receiver: DeviceReceiver) -> None:
    """With other rows, and for longer than there are slots."""
    for timeline, versions in ((0, range(7)), (1, range(4, 12))):
        for n in versions:
            rows = content(n + 12 * timeline)
            receipt = offer_rows(senders, n, rows, timeline)
            version, tensors = receiver.take(Version(timeline, n), 30)
            assert version == Version(timeline, n) and receiver.receipt() == receipt
            assert all(torch.equal(tensor.float(), rows[name]) for name, tensor in tensors)
            assert receiver.release()


def test_a_receiver_that_is_killed_in_an_update_and_its_successor(run: RunFile, senders: list[Sender]) -> None:
    receipts = [offer(senders, 0)]
    dying, other = follower(run, 0, halts=signal.SIGKILL), follower(run, 1)
    for each in (dying, other):
        each.pipe.send((0, 0))
    assert other.answer() == (0, True, receipts[0])
    dying.process.join(60)
    assert dying.process.exitcode == -signal.SIGKILL

    for sender in senders:
        sender.receiver_died("generator-0", 0)
    successor = follower(run, 0, 1)
    for n in range(1, 5):  # more than there are slots
        receipts.append(offer(senders, n))
        for each in (other, successor):
            each.pipe.send((0, n))
            assert each.answer() == (n, True, receipts[n])


def test_a_receiver_that_stands_still_holds_up_nobody_and_is_given_up(make_run: MakeRun, channel: str) -> None:
    run = make_run(*settings(channel), "weights.deadline_s=8")
    senders = [make_sender(run, rank, ENTRIES) for rank in range(RANKS)]
    for sender in senders:
        sender.open()
    receipts = [offer(senders, 0)]
    other, still = follower(run, 1), follower(run, 0, halts=signal.SIGSTOP)
    other.pipe.send((0, 0))
    assert other.answer() == (0, True, receipts[0])

    still.pipe.send((0, 0))
    while psutil.Process(still.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    for n in range(1, 5):  # more than there are slots, of which it has one
        receipts.append(offer(senders, n))
        other.pipe.send((0, n))
        assert other.answer() == (n, True, receipts[n])
    last = senders[1]
    assert isinstance(last, DeviceSender) and last._sending[0]  # all that while the second rank waits for it

    while last._sending[0]:
        time.sleep(0.05)
    still.process.kill()
    for sender in senders:
        sender.close()


def test_a_learner_that_dies_is_awaited_and_its_successor_found(run: RunFile) -> None:
    learner = Other(lead, str(run.folder), 0)
    engine = follower(run, 0)
    engine.pipe.send((0, 0))
    assert engine.answer() == (0, True, learner.answer())
    learner.process.kill()
    learner.process.join(60)

    engine.pipe.send((0, 1))
    successor = Other(lead, str(run.folder), 7)
    assert engine.answer() == (7, True, successor.answer())
    successor.process.kill()


def test_what_differs_from_what_was_sent_is_refused_and_named(senders: list[Sender], receiver: DeviceReceiver) -> None:
    offer(senders, 0)
    receiver.take(Version(0, 0), 30)
    assert receiver._line is not None and isinstance(senders[1], DeviceSender)
    has = senders[1]._parts[0] if isinstance(receiver, IpcReceiver) else receiver._line._parts[1]
    has[40] ^= 1
    with pytest.raises(WeightsCorrupt, match=r"generator-0-0, version 0\.0: the rows of rank 1 differ"):
        receiver.receipt()


def test_waits_have_a_deadline_and_a_name(senders: list[Sender], receiver: DeviceReceiver) -> None:
    offer(senders, 0)
    with pytest.raises(WaitExpired, match=r"generator-0-0 waits for weights 0\.1 or newer"):
        receiver.take(Version(0, 1), 0.3)
    assert receiver.take(Version(0, 0), 30)[0] == Version(0, 0)  # an expired wait leaves nothing behind
    senders[0].wait = lambda _, ask: ask(0.2)
    rows = {"embed": 151, "norm": 4}  # of the first of two ranks
    whole = content(1)
    pieces = [(name, whole[name][:count], Placement(tuple(whole[name].shape))) for name, count in rows.items()]
    senders[0].offer(1, [*pieces, ("scalar", whole["scalar"], Placement(()))])
    with pytest.raises(WaitExpired, match="learner rank 0 waits for rank 1 to offer version 1"):
        senders[0].receipt(1)


def test_rows_that_are_missing_are_an_error(senders: list[Sender], receiver: DeviceReceiver) -> None:
    for rank, sender in enumerate(senders):
        sender.offer(0, [("embed", torch.ones(150, 16), Placement((301, 16), 150 * rank))])
    senders[0].receipt(0)
    senders[0].announce(Version(0, 0))
    with pytest.raises(WeightsError, match="'embed': the ranks send 4800 elements of 4816"):
        receiver.take(Version(0, 0), 30)
    with pytest.raises(WeightsError, match=r"version 1 of rank 0 lacks .*'embed'"):
        senders[0].offer(1, [])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="not run: NCCL needs two CUDA devices")
def test_between_gpus_a_killed_receiver_is_followed_by_another(make_run: MakeRun) -> None:
    """Both ranks of the learner are on the first device, which NCCL allows: no group has two of one device."""
    run = make_run(*settings("nccl"), "weights.deadline_s=20", "learner.kind=fsdp", device="cuda")
    torch.cuda.set_device(0)
    senders = [make_sender(run, rank, ENTRIES) for rank in range(RANKS)]
    for sender in senders:
        sender.open()
    receipts = [offer(senders, 0)]
    dying = follower(run, 0, halts=signal.SIGKILL, device="cuda:1")
    dying.pipe.send((0, 0))
    dying.process.join(120)
    for sender in senders:
        sender.receiver_died("generator-0", 0)

    successor = follower(run, 0, 1, device="cuda:1")
    for n in range(1, 5):
        receipts.append(offer(senders, n))
        successor.pipe.send((0, n))
        assert successor.answer() == (n, True, receipts[n])
    for sender in senders:
        sender.close()


@pytest.mark.parametrize("words", [1, 1 << 14, (1 << 14) * 257 + 3])
def test_a_digest_sees_one_bit_and_two_that_change_places(words: int) -> None:
    data = torch.randint(0, 256, (4 * words,), dtype=torch.uint8)
    found = {device_digest(data)}
    data[-1] ^= 64
    found.add(device_digest(data))
    if words > 1:
        swapped = data.view(torch.int32).flip(0)
        found.add(device_digest(swapped.view(torch.uint8)))
    assert len(found) == 2 + (words > 1) and device_digest(data.clone()) in found

"""Channel `ipc` on a CPU: blocks are read in place, under a lease; who dies leaves nothing, and damages nothing."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rl.weights import make_receiver, make_sender
from rl.weights.channel import Sender, WeightsError
from rl.weights.device import ipc
from rl.weights.device.blocks import Block, Handle, make_block, map_block
from rl.weights.device.ends import DeviceSender
from rl.weights.device.ipc import IpcLine, IpcReceiver
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from tests.conftest import MakeRun
from tests.rl.weights.device.test_channels import ENTRIES, Other, content, follower, lead
from tests.rl.weights.offering import offer_rows

CPU = torch.device("cpu")
MAPPED = re.compile(r"(\d+) +(/memfd:fresco-weights|/dev/shm/\S+)")


def offer(sender: Sender, n: int) -> int | None:
    return offer_rows([sender], n, content(n))


def mapped(pid: int | None) -> set[tuple[str, str]]:
    """What a process has mapped of shared memory: numbers and names."""
    return set(MAPPED.findall(Path(f"/proc/{pid}/maps").read_text()))


def has_blocks_without_a_name(pid: int | None, count: int) -> bool:
    return [name for _, name in mapped(pid)] == ["/memfd:fresco-weights"] * count


@pytest.fixture
def opened(make_run: MakeRun) -> Iterator[Callable[..., tuple[DeviceSender, IpcReceiver]]]:
    """A sender and a receiver in this process, for settings."""
    ends: list[DeviceSender | IpcReceiver] = []

    def both(*settings: str) -> tuple[DeviceSender, IpcReceiver]:
        run = make_run("weights.transport=ipc", *settings)
        sender, receiver = make_sender(run, 0, ENTRIES), make_receiver(run, "generator-0-0", 0)
        assert isinstance(sender, DeviceSender) and isinstance(receiver, IpcReceiver)
        sender.open()
        ends.extend((receiver, sender))
        return sender, receiver

    yield both
    for end in ends:
        end.close()


Opened = Callable[..., tuple[DeviceSender, IpcReceiver]]


def line_of(receiver: IpcReceiver) -> IpcLine:
    assert isinstance(receiver._line, IpcLine)
    return receiver._line


def test_what_is_loaded_stands_in_the_senders_own_blocks(opened: Opened) -> None:
    sender, receiver = opened()
    for n in range(7):
        offer(sender, n)
        _, tensors = receiver.take(Version(0, n), 30)
        arrived = dict(tensors)
        sender._parts[n][:] = 0  # as nobody may: it shows whose bytes they are
        assert all(not tensor.any() for tensor in arrived.values() if tensor.numel())
        assert receiver.release()


def test_a_lease_that_is_kept_too_long_ends_and_its_reader_is_told(opened: Opened) -> None:
    sender, receiver = opened("weights.deadline_s=1", "weights.slots=2")
    sender.wait = lambda _, ask: ask(60)  # no step of training lies between the lease and the wait for its end
    offer(sender, 0)
    _, tensors = receiver.take(Version(0, 0), 30)
    receipts = [offer(sender, n) for n in (1, 2)]  # the second one goes over version 0, once its lease has ended
    assert torch.equal(dict(tensors)["norm"], content(2)["norm"])
    assert receiver.receipt() == 0 and not receiver.release()

    version, tensors = receiver.take(Version(0, 0), 30)
    assert (version, receiver.receipt()) == (Version(0, 2), receipts[-1])
    assert torch.equal(dict(tensors)["norm"], content(2)["norm"]) and receiver.release()


def test_no_slot_is_written_while_it_is_leased(make_run: MakeRun) -> None:
    run = make_run("weights.transport=ipc", "weights.slots=2", "weights.deadline_s=60")
    sender = make_sender(run, 0, ENTRIES)
    sender.open()
    offer(sender, 0)
    dying = follower(run, 0, halts=signal.SIGSTOP)
    dying.pipe.send((0, 0))
    while psutil.Process(dying.process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)

    offer(sender, 1)
    sender.wait = lambda _, ask: ask(0.7)
    with pytest.raises(WaitExpired, match=r"waits for a weight slot: version \[0\] is being sent"):
        offer(sender, 2)

    assert has_blocks_without_a_name(dying.process.pid, 1)  # no name that could stay
    dying.process.kill()
    dying.process.join(60)
    sender.receiver_died("generator-0", 0)
    sender.wait = lambda _, ask: ask(60)
    receipt = offer(sender, 2)
    successor = follower(run, 0, 1)
    successor.pipe.send((0, 2))
    assert successor.answer() == (2, True, receipt)
    sender.close()


def test_the_bytes_of_a_learner_that_was_killed_are_proven_again(make_run: MakeRun) -> None:
    run = make_run("weights.transport=ipc", "weights.deadline_s=60")
    receiver = make_receiver(run, "generator-0-0", 0)
    assert isinstance(receiver, IpcReceiver)
    blocks: set[tuple[str, str]] = set()

    def taken(learner: Other, n: int) -> dict[str, torch.Tensor]:
        version, tensors = receiver.take(Version(0, n), 60)
        assert version == Version(0, n) and receiver.receipt() == learner.answer()
        assert has_blocks_without_a_name(learner.process.pid, 3)
        blocks.update(mapped(learner.process.pid))
        learner.process.kill()
        learner.process.join(60)
        return dict(tensors)

    arrived = taken(Other(lead, str(run.folder), 0), 0)
    assert all(torch.equal(arrived[name].float(), whole) for name, whole in content(0).items())
    assert receiver.release()
    del arrived
    assert len(blocks) == 3 and not blocks & mapped(os.getpid())  # the successor has all the room

    arrived = taken(Other(lead, str(run.folder), 5), 5)
    line_of(receiver)._digests[0] ^= 1  # as if the device had taken them back meanwhile
    assert receiver.receipt() == 0 and not receiver.release()
    del arrived
    assert len(blocks) == 6 and not blocks & mapped(os.getpid())


def test_a_block_has_one_device_and_ends_with_its_maker() -> None:
    block = make_block(4096, CPU)
    assert not block.data.any() and Handle(*json.loads(json.dumps(block.handle))) == block.handle
    with pytest.raises(WeightsError, match=r"the learner is on GPU 7 and the engine on cpu; set placement=shared"):
        map_block(Handle("GPU 7", 64, ""), CPU)

    view = map_block(block.handle, CPU)
    block.data[7] = 3
    assert view.data[7] == 3 and view.data.data_ptr() != block.data.data_ptr()
    block.close()
    with pytest.raises(OSError):
        map_block(block.handle, CPU)


def refuse(handle: Handle, device: torch.device) -> Block:
    raise RuntimeError("cudaIpcOpenMemHandle: invalid argument")


def test_memory_that_cannot_be_mapped_is_told_while_the_learner_lives(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that forbids CUDA IPC: a wait until the deadline would change nothing, and hide why."""
    monkeypatch.setattr(ipc, "map_block", refuse)
    monkeypatch.setattr(ipc, "_DYING_S", 0.1)
    sender, receiver = opened()
    offer(sender, 0)
    with pytest.raises(WeightsError, match=r"cudaIpcOpenMemHandle: invalid argument\); set weights.transport=shm"):
        receiver.take(Version(0, 0), 60)


def test_the_memory_of_a_learner_that_dies_may_go_before_its_lock(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("weights.transport=ipc", "weights.deadline_s=60")
    receiver = make_receiver(run, "generator-0-0", 0)
    first = Other(lead, str(run.folder), 0)
    first.answer()

    def die(handle: Handle, device: torch.device) -> Block:
        first.process.kill()
        monkeypatch.setattr(ipc, "map_block", map_block)
        return refuse(handle, device)

    monkeypatch.setattr(ipc, "map_block", die)
    monkeypatch.setattr(ipc, "_DYING_S", 60)
    with pytest.raises(WaitExpired, match=r"0.0 or newer: cudaIpcOpenMemHandle: invalid argument"):
        receiver.take(Version(0, 0), 5)

    successor = Other(lead, str(run.folder), 5)
    assert receiver.take(Version(0, 5), 60)[0] == Version(0, 5)
    assert receiver.receipt() == successor.answer()
    receiver.close()


CUDART = r"""
#include <cstdlib>
#include <cstring>
struct Handle { char reserved[64]; };
extern "C" {
int cudaMalloc(void** at, size_t bytes) { *at = aligned_alloc(512, (bytes + 511) / 512 * 512); return 0; }
int cudaIpcGetMemHandle(Handle* made, void* at) { memset(made, 0xab, 64); memcpy(made, &at, 8); return 0; }
int cudaIpcOpenMemHandle(void** at, Handle told, unsigned flags) {
  if (flags != 1 || told.reserved[63] != char(0xab)) return 1;
  memcpy(at, &told, 8);
  return 0;
}
int cudaIpcCloseMemHandle(void* at) { memset(at, 1, 1); return 0; }
int asked = 0;
int cudaGetLastError() { ++asked; return 1; }
int cudaFree(void* at) { memset(at, 2, 1); return 0; }
const char* cudaGetErrorString(int code) { return "invalid argument"; }
}
"""


def test_memory_of_cuda_goes_by_its_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of CUDA's runtime, of a library with its functions that has the memory of the host."""
    library = tmp_path / "libcudart.so.99"
    (tmp_path / "cudart.cpp").write_text(CUDART)
    built = "g++", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", "-o", library, tmp_path / "cudart.cpp"
    subprocess.run(built, check=True)
    ctypes.CDLL(str(library))  # as torch has loaded its own

    def on_host(pointer: Any, device: torch.device) -> torch.Tensor:
        told = pointer.__cuda_array_interface__
        return torch.frombuffer((ctypes.c_byte * told["shape"][0]).from_address(told["data"][0]), dtype=torch.uint8)

    monkeypatch.setattr(torch.version, "cuda", "99.1")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="7"))
    monkeypatch.setattr(torch, "as_tensor", on_host)
    gpu = torch.device("cuda", 0)

    block = make_block(1000, gpu)
    assert block.handle.device == "GPU 7" and len(block.data) == 1000 and not block.data.any()
    view = map_block(Handle(*json.loads(json.dumps(block.handle))), gpu)
    block.data[7] = 3
    assert view.data[7] == 3
    with pytest.raises(RuntimeError, match="cudaIpcOpenMemHandle: invalid argument"):
        map_block(block.handle._replace(name=bytes(64).hex()), gpu)
    assert ctypes.c_int.in_dll(ctypes.CDLL(library.name), "asked").value == 1  # torch would raise it for a kernel

    view.close()
    assert block.data[0] == 1
    block.close()
    assert block.data[0] == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: CUDA IPC needs a CUDA device")
def test_on_one_gpu_a_killed_receiver_is_followed_by_another(make_run: MakeRun) -> None:
    run = make_run("weights.transport=ipc", "weights.deadline_s=20", "learner.kind=fsdp", device="cuda")
    sender = make_sender(run, 0, ENTRIES)
    sender.open()
    receipts = [offer(sender, 0)]
    dying = follower(run, 0, halts=signal.SIGKILL, device="cuda:0")
    dying.pipe.send((0, 0))
    dying.process.join(120)
    sender.receiver_died("generator-0", 0)

    successor = follower(run, 0, 1, device="cuda:0")
    for n in range(1, 5):
        receipts.append(offer(sender, n))
        successor.pipe.send((0, n))
        assert successor.answer() == (n, True, receipts[n])
    sender.close()

"""Weights from fp32 master copies to an engine's private memory, against two bare copies of the same bytes.

    python -m experiments.bench weights [--gigabytes 1] [--tensors 253] [--rounds 7] [--out FILE.json]

A round of a channel casts fp32 to bf16 and publishes it. The receiver takes it and copies it into
touched private memory, as an engine does when it loads. Both sides hash every byte in several threads, as learner and
engine do: the sender beside its copy, the receiver before it, while an engine would generate. The limit is a cast copy
into touched memory followed by a plain copy out of it.
Sender and receiver take turns in one process, alternating with the limit, so that other load hits both alike.
CPU seconds tell what the hashing costs where no second core is free. The channel zmq (ipc) is reported beside them:
its sender works in a thread of its own, and its reception is the copy. Target: at most 1 / 0.8 by the clock.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator
from functools import partial

import torch

from experiments.bench._measuring import Work, alternate, parser_of, temporary_run, write
from experiments.bench._ratios import Idle, provenance, ratio_of
from rl.config.schema import load_config
from rl.weights import make_receiver, make_sender
from rl.weights.channel import Entry, Placement, Receiver, Sender, bytes_of
from rl.weights.host import make_room
from rl.wire.messages import Version

TARGET = 1.25


def entries(total_bytes: int, count: int) -> list[Entry]:
    """bf16 tensors in the proportions of a transformer: an embedding of a tenth, matrices, and vectors between."""
    matrices = max(1, count // 2)
    width = 1024
    rows = total_bytes // 2 * 9 // 10 // matrices // width
    tensors: list[Entry] = [("embed", (total_bytes // 20 // width, width), "bfloat16")]
    for index in range(count - 1):
        tensors.append((f"layer.{index}", (rows, width) if index % 2 else (width,), "bfloat16"))
    return tensors


def bare_copies(masters: dict[str, torch.Tensor]) -> Work:
    """The limit: cast every tensor into touched memory, then copy all of it into touched memory."""
    count = sum(master.numel() for master in masters.values())
    between = torch.zeros(count, dtype=torch.bfloat16)
    private = torch.zeros(count, dtype=torch.bfloat16)

    def run() -> None:
        at = 0
        for master in masters.values():
            between[at : at + master.numel()].copy_(master.view(-1))
            at += master.numel()
        private.copy_(between)

    return run


@contextlib.contextmanager
def channel(kind: str, tensors: list[Entry], masters: dict[str, torch.Tensor]) -> Iterator[Work]:
    """One round: offer, announce, take, verify."""
    # Touched: fresh pages are ten times slower.
    shm = kind == "shm"
    private = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape, _ in tensors} if shm else None

    with temporary_run([f"weights.transport={kind}"]) as run:
        sender = make_sender(run, 0, tensors)
        receiver = make_receiver(run, "generator-0-0", 0)
        sender.open()
        try:
            yield partial(_transfer, sender, receiver, masters, itertools.count(), private)
        finally:
            receiver.close()
            sender.close()


def _transfer(
    sender: Sender,
    receiver: Receiver,
    masters: dict[str, torch.Tensor],
    versions: Iterator[int],
    private: dict[str, torch.Tensor] | None,
) -> None:
    """The receipt comes before the engine's copy into `private`, as engines have it; the reception of zmq is one."""
    version = Version(0, next(versions))
    sender.offer(version.n, ((name, master, Placement(tuple(master.shape))) for name, master in masters.items()))
    sender.announce(version)

    _, received = receiver.take(version, 30)
    receiver.receipt()
    if private is not None:
        for name, tensor in received:
            private[name].copy_(tensor)

    if not receiver.release():
        raise RuntimeError("torn in a benchmark with one receiver")


def main(argv: list[str]) -> None:
    parser = parser_of("weights", __doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="bf16 bytes of one version")
    parser.add_argument("--tensors", type=int, default=253)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)

    tensors = entries(int(options.gigabytes * 1e9), options.tensors)
    make_room(load_config(None, []), bytes_of(tensors))
    masters = {name: torch.full((math.prod(shape),), 0.5).view(shape) for name, shape, _ in tensors}
    with channel("shm", tensors, masters) as shm, channel("zmq", tensors, masters) as zmq:
        works: dict[str, Work] = {"bare": bare_copies(masters), "shm": shm, "zmq": zmq}
        with Idle() as idle:
            measured = alternate(works, options.rounds, warm_up=3)  # one for each slot

    wall = {name: statistics.median(one.wall_s for one in timings) for name, timings in measured.items()}
    cpu = {name: statistics.median(one.cpu_s for one in timings) for name, timings in measured.items()}
    gigabytes = bytes_of(tensors) / 1e9
    print(f"{gigabytes:.2f} GB bf16 in {options.tensors} tensors, {options.rounds} rounds; medians")
    for name, what in (("bare", "two bare copies"), ("shm", "shared memory, verified"), ("zmq", "zmq ipc, verified")):
        print(f"  {what:24} {wall[name]:6.3f} s  {gigabytes / wall[name]:5.2f} GB/s  CPU {cpu[name]:6.3f} s")

    ratios = {f"{name}_over_bare": ratio_of(measured[name], measured["bare"]) for name in ("shm", "zmq")}
    verdict = ratios["shm_over_bare"].verdict(at_most=TARGET, of="wall", idle=idle)
    print(f"  shared memory over bare copies: {ratios['shm_over_bare']}; {verdict}")
    result = {"gigabytes": gigabytes, "tensors": options.tensors, "rounds": measured, "wall_s": wall, "cpu_s": cpu}
    write(options.out, result | {"verdict": verdict} | provenance(idle, ratios))

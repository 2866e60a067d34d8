"""Weights from fp32 master copies to an engine's private memory, against two bare copies of the same bytes.

    python -m experiments.bench weights [--gigabytes 1] [--tensors 253] [--rounds 7] [--out FILE.json]

A round of the transport casts fp32 to bf16 into a slot and publishes it; the reader leases it and copies it into
touched private memory, as an engine does when it loads. Both sides hash every byte, in a second thread beside the
copy, as learner and engine do. The limit is a cast copy into touched memory followed by a plain copy out of it.
Writer and reader take turns in one process, alternating with the limit, so that other load hits both alike.
CPU seconds tell what the hashing costs where no second core is free. The zmq transport (ipc) is reported beside them:
its sender works in a thread of its own, and its reception is the copy. Target: at most 1 / 0.8 by the clock.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import threading
from collections.abc import Iterator
from functools import partial

import torch

from experiments.bench._measuring import Work, alternate, parser_of, temporary_run, write
from experiments.bench._ratios import Idle, provenance, ratio_of
from rl.learner.export import write_shard
from rl.weights import Manifest, WeightReader, WeightWriter, make_reader, make_writer
from rl.weights.shm_file import check_space
from rl.wire.messages import Version

TARGET = 1.25


def entries(total_bytes: int, count: int) -> list[tuple[str, tuple[int, ...], str]]:
    """bf16 tensors in the proportions of a transformer: an embedding of a tenth, matrices, and vectors between."""
    matrices = max(1, count // 2)
    width = 1024
    rows = total_bytes // 2 * 9 // 10 // matrices // width
    tensors: list[tuple[str, tuple[int, ...], str]] = [("embed", (total_bytes // 20 // width, width), "bfloat16")]
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
def transport(kind: str, manifest: Manifest, masters: dict[str, torch.Tensor]) -> Iterator[Work]:
    """One round: write, publish, read, verify."""
    # Touched: fresh pages are ten times slower.
    private = torch.ones(manifest.total_bytes, dtype=torch.uint8) if kind == "shm" else None

    with temporary_run([f"weights.transport={kind}"]) as run:
        writer = make_writer(run, 0, manifest)
        reader = make_reader(run, "generator-0-0", 0)
        writer.open()
        reader.open(30)
        try:
            yield partial(_transfer, writer, reader, manifest, masters, itertools.count(), private)
        finally:
            reader.close()
            writer.close()


def _transfer(
    writer: WeightWriter,
    reader: WeightReader,
    manifest: Manifest,
    masters: dict[str, torch.Tensor],
    versions: Iterator[int],
    private: torch.Tensor | None,
) -> None:
    """The engine's copy into `private` goes on while a second thread hashes; the zmq transport's reception is one."""
    version = Version(0, next(versions))
    view = writer.begin(version, 30)
    writer.commit(write_shard(view, manifest, ((name, master, 0) for name, master in masters.items())))

    _, received = reader.lease(version, 30)
    checking = threading.Thread(target=reader.checksum)
    checking.start()
    if private is not None:
        private.copy_(torch.frombuffer(received, dtype=torch.uint8))
    checking.join()

    if not reader.release():
        raise RuntimeError("torn in a benchmark with one reader")


def main(argv: list[str]) -> None:
    parser = parser_of("weights", __doc__)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="bf16 bytes of one version")
    parser.add_argument("--tensors", type=int, default=253)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)

    manifest = Manifest.layout(entries(int(options.gigabytes * 1e9), options.tensors))
    check_space(manifest.total_bytes, 3)
    masters = {spec.name: torch.full((math.prod(spec.shape),), 0.5).view(spec.shape) for spec in manifest.tensors}
    with transport("shm", manifest, masters) as shm, transport("zmq", manifest, masters) as zmq:
        works: dict[str, Work] = {"bare": bare_copies(masters), "shm": shm, "zmq": zmq}
        with Idle() as idle:
            measured = alternate(works, options.rounds, warm_up=3)  # one for each slot

    wall = {name: statistics.median(one.wall_s for one in timings) for name, timings in measured.items()}
    cpu = {name: statistics.median(one.cpu_s for one in timings) for name, timings in measured.items()}
    gigabytes = manifest.total_bytes / 1e9
    print(f"{gigabytes:.2f} GB bf16 in {options.tensors} tensors, {options.rounds} rounds; medians")
    for name, what in (("bare", "two bare copies"), ("shm", "shared memory, verified"), ("zmq", "zmq ipc, verified")):
        print(f"  {what:24} {wall[name]:6.3f} s  {gigabytes / wall[name]:5.2f} GB/s  CPU {cpu[name]:6.3f} s")

    ratios = {f"{name}_over_bare": ratio_of(measured[name], measured["bare"]) for name in ("shm", "zmq")}
    verdict = ratios["shm_over_bare"].verdict(at_most=TARGET, of="wall", idle=idle)
    print(f"  shared memory over bare copies: {ratios['shm_over_bare']}; {verdict}")
    result = {"gigabytes": gigabytes, "tensors": options.tensors, "rounds": measured, "wall_s": wall, "cpu_s": cpu}
    write(options.out, result | {"verdict": verdict} | provenance(idle, ratios))

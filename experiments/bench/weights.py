"""Weights from fp32 master copies to an engine's private memory, against two bare copies of the same bytes.

    python -m experiments.bench weights [--gigabytes 1] [--tensors 253] [--rounds 7] [--out FILE.json]

A round of the transport casts fp32 to bf16 into a slot, publishes it, and reads it into touched private memory:
both sides hash every byte. The limit is a cast copy into touched memory followed by a plain copy out of it.
Both run in one process on one thread, alternating, so that other load hits both alike; medians are compared.
The zmq transport (ipc) is reported beside them: its sender works in a thread of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from rl.config import load_config
from rl.messages import Version
from rl.run import RunFile
from rl.weights import Manifest, make_reader, make_writer
from rl.weights.export import write_shard
from rl.weights.shm import ShmReader, check_space

Round = Callable[[], None]


def entries(total_bytes: int, count: int) -> list[tuple[str, tuple[int, ...], str]]:
    """bf16 tensors in the proportions of a transformer: an embedding of a tenth, matrices, and vectors between."""
    matrices = max(1, count // 2)
    width = 1024
    rows = total_bytes // 2 * 9 // 10 // matrices // width
    tensors: list[tuple[str, tuple[int, ...], str]] = [("embed", (total_bytes // 20 // width, width), "bfloat16")]
    for index in range(count - 1):
        tensors.append((f"layer.{index}", (rows, width) if index % 2 else (width,), "bfloat16"))
    return tensors


def bare_copies(masters: dict[str, torch.Tensor]) -> Round:
    """The limit: cast every tensor into touched memory, then copy all of it into touched memory."""
    count = sum(master.numel() for master in masters.values())
    between, private = torch.zeros(count, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.bfloat16)

    def run() -> None:
        at = 0
        for master in masters.values():
            between[at : at + master.numel()].copy_(master.view(-1))
            at += master.numel()
        private.copy_(between)

    return run


@contextlib.contextmanager
def transport(kind: str, manifest: Manifest, masters: dict[str, torch.Tensor]) -> Iterator[Round]:
    """One round: write, publish, read, verify."""
    folder = Path(tempfile.mkdtemp(prefix="fresco-bench-"))
    run = RunFile(
        config=load_config(None, [f"weights.transport={kind}"]), run_id=uuid.uuid4().hex[:8], folder=folder,
        socket_folder=folder, device="cpu", train_tasks=1, eval_tasks=1, started_at=time.time(),
    )  # fmt: skip
    writer, reader = make_writer(run, 0, manifest), make_reader(run, "generator-0-0", 0)
    versions = iter(range(1 << 30))
    private = np.zeros(manifest.total_bytes, np.uint8)
    private[:] = 1  # touched: writing into fresh pages is ten times slower

    def once() -> None:
        version = Version(0, next(versions))
        view = writer.begin(version, 30)
        writer.commit(write_shard(view, manifest, ((name, master, 0) for name, master in masters.items())))
        reader.lease(version, 30)
        if isinstance(reader, ShmReader):
            reader.copy(private.data)
        else:
            reader.checksum()  # its view is private memory already
        if not reader.release():
            raise RuntimeError("torn in a benchmark with one reader")

    try:
        writer.open()
        reader.open(30)
        yield once
    finally:
        reader.close()
        writer.close()
        shutil.rmtree(folder)


def measure(rounds: dict[str, Round], count: int) -> dict[str, list[float]]:
    """Seconds of each, alternating, after one warm-up per slot."""
    seconds: dict[str, list[float]] = {name: [] for name in rounds}
    for index in range(-3, count):
        for name, run in rounds.items():
            begin = time.perf_counter()
            run()
            if index >= 0:
                seconds[name].append(time.perf_counter() - begin)
    return seconds


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="experiments.bench weights", description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="bf16 bytes of one version")
    parser.add_argument("--tensors", type=int, default=253)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    manifest = Manifest.layout(entries(int(options.gigabytes * 1e9), options.tensors))
    check_space(manifest.total_bytes, 3)
    masters = {spec.name: torch.full((math.prod(spec.shape),), 0.5).view(spec.shape) for spec in manifest.tensors}
    with transport("shm", manifest, masters) as shm, transport("zmq", manifest, masters) as zmq:
        seconds = measure({"bare": bare_copies(masters), "shm": shm, "zmq": zmq}, options.rounds)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [bare / ours for bare, ours in zip(seconds["bare"], seconds["shm"], strict=True)]
    gigabytes = manifest.total_bytes / 1e9
    print(f"{gigabytes:.2f} GB bf16 in {options.tensors} tensors, {options.rounds} rounds, one thread")
    for name, what in (("bare", "two bare copies"), ("shm", "shared memory, verified"), ("zmq", "zmq ipc, verified")):
        print(f"  {what:24} {median[name]:6.3f} s  {gigabytes / median[name]:5.2f} GB/s")
    ratio = median["bare"] / median["shm"]
    print(
        f"  shared memory reaches {ratio:.2f} of the limit (rounds: {min(ratios):.2f} to {max(ratios):.2f}; aim 0.80)"
    )
    if options.out is not None:
        result = {"gigabytes": gigabytes, "tensors": options.tensors, "seconds": seconds, "median_s": median}
        options.out.write_text(json.dumps(result | {"shm_of_limit": ratio}, indent=2) + "\n")

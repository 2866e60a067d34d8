"""What more threads give a learner rank: alone, and beside an engine that keeps the other cores busy.

    python -m experiments.bench threads [--rounds 5] [--groups 8] [--hidden 128] [--out FILE.json]

A rank with 1, 2 and 4 threads (as many as there are cores) takes a training step in turn. Each is a process of its own,
pinned to the first cores. Then again while a process on the last core computes without a pause, as an engine does: with
as many threads as cores the learner shares that core with it.

What is to be expected: a small model's step is hundreds of short operations. Each that is split among threads ends when
the last of them has its part. So a thread whose core is taken holds up the others until the kernel gives it back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from experiments.bench._measuring import Timing, in_turns, parser_of, random_batch_part, temporary_run, timed, write
from experiments.bench._ratios import Idle, Ratio, provenance, ratio_of
from experiments.bench.learner import run_fields
from rl.learner.process import Learner
from rl.wire.process import Process, die_with_parent
from rl.wire.run import ProcessContext

_COUNTS = (1, 2, 4)
_WARM_UP = 2
_END_S = 60.0


def main(argv: list[str]) -> None:
    parser = parser_of("threads", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rank", type=int, metavar="THREADS", help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(dtype="float32", device="cpu", lengths="mixed")
    options = parser.parse_args(argv)

    if options.engine:
        return _compute()
    if options.rank:
        return _rank(options)

    cores = sorted(os.sched_getaffinity(0))
    counts = [count for count in _COUNTS if count <= len(cores)]
    with Idle() as idle:
        alone = _in_turns(counts, cores, options)
        with _started(["--engine"], cores[-1:]):
            beside = _in_turns(counts, cores, options)

    ratios = {f"{count} threads over 1, alone": ratio_of(alone[count], alone[1]) for count in counts[1:]}
    ratios |= {f"{count} threads over 1, beside an engine": ratio_of(beside[count], beside[1]) for count in counts[1:]}
    _report(ratios, idle, options)


def _report(ratios: dict[str, Ratio], idle: Idle, options: argparse.Namespace) -> None:
    for name, ratio in ratios.items():
        print(f"{name}: {ratio}")
    print(idle.told(options.rounds))
    write(options.out, {"refusal": idle.refusal(options.rounds)} | provenance(idle, ratios))


def _in_turns(counts: list[int], cores: list[int], options: argparse.Namespace) -> dict[int, list[Timing]]:
    """For each number of threads, the steps that were measured."""
    measured: dict[int, list[Timing]] = {count: [] for count in counts}
    size = ["--groups", str(options.groups), "--hidden", str(options.hidden), "--layers", str(options.layers)]

    with ExitStack() as stack:
        ranks = {count: stack.enter_context(_started(["--rank", str(count), *size], cores[:count])) for count in counts}
        for number, count in in_turns(counts, options.rounds, _WARM_UP):
            timing = _step(ranks[count])
            if number >= 0:
                measured[count].append(timing)

    return measured


def _step(rank: subprocess.Popen[str]) -> Timing:
    assert rank.stdin is not None and rank.stdout is not None
    print("step", file=rank.stdin, flush=True)
    line = rank.stdout.readline()
    if not line:
        raise SystemExit("a rank of the benchmark has died")
    return Timing(*json.loads(line))


@contextmanager
def _started(arguments: list[str], cores: list[int]) -> Iterator[subprocess.Popen[str]]:
    """This module in a process of its own, on these cores; it ends with its input."""
    command = [sys.executable, "-m", "experiments.bench", "threads", *arguments]
    environment = os.environ | {"FRESCO_PARENT_PID": str(os.getpid()), "OMP_WAIT_POLICY": "PASSIVE"}
    pinned = ["taskset", "-c", ",".join(map(str, cores)), *command]
    pipe = subprocess.PIPE

    with subprocess.Popen(pinned, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        try:
            yield process
        finally:
            try:
                process.communicate(timeout=_END_S)  # so that it takes its folder with it
            except subprocess.TimeoutExpired:
                process.kill()


def _compute() -> None:
    """Compute as an engine does at full load: one thread that never waits, until the input ends."""
    die_with_parent()
    torch.set_num_threads(1)
    matrix = torch.ones(256, 256)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            torch.mm(matrix, matrix)

    worker = threading.Thread(target=work, name="compute")
    worker.start()
    sys.stdin.read()
    ended.set()
    worker.join()


def _rank(options: argparse.Namespace) -> None:
    """A step for each line that is read; wall and CPU seconds of each are written."""
    die_with_parent()
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        overrides, fields = run_fields(Path(folder), options)
        with temporary_run([*overrides, f"learner.threads={options.rank}"], **fields) as run:
            learner = Learner(Process("learner", ProcessContext(run, 0, 0)))  # not entered: there is no supervisor
            rollout = run.config.rollout
            batch_part = random_batch_part(rollout.groups_per_batch, rollout.group_size, 64, (32, 128), 1024)

            def step() -> None:
                learner.token_log.batch(batch_part)
                for minibatch in learner.trainer.minibatches(batch_part):
                    learner.trainer.update(minibatch, batch_part.step)
                learner.token_log.write_batch()

            for _ in sys.stdin:
                print(json.dumps(list(timed(step))), flush=True)

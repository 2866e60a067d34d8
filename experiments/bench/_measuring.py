"""What every benchmark needs: its command line, a run file, batches, works timed in turns, a result."""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import psutil

from experiments.columns import token_columns
from rl.config.schema import load_config
from rl.wire.messages import BatchPart, SampleRow
from rl.wire.run import RunFile
from rl.wire.sockets import make_curve_key

Work = Callable[[], object]
Name = TypeVar("Name")


class Timing(NamedTuple):
    """The time of one call, in seconds; CPU of this process and of the children it has reaped."""

    wall_s: float
    cpu_s: float


def parser_of(name: str, description: str | None) -> argparse.ArgumentParser:
    """The command line of one benchmark, with `--out` for its result."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    return parser


def write(out: Path | None, result: Mapping[str, Any]) -> None:
    """Write the result as indented JSON, if there is a path."""
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")


def report(measured: dict[str, float], bounds: str, out: Path | None) -> None:
    """Print each figure and what it should be, beside the load of the machine, and write them."""
    measured["load_average"] = os.getloadavg()[0]
    for name, value in measured.items():
        print(f"{name}: {value:.2f}")

    print(f"bounds: {bounds}")
    write(out, measured)


def timed(work: Work) -> Timing:
    """The time of one call."""
    cpu = _cpu_s()
    begin = time.perf_counter()
    work()

    return Timing(time.perf_counter() - begin, _cpu_s() - cpu)


def alternate(works: Mapping[str, Work], rounds: int, warm_up: int = 0) -> dict[str, list[Timing]]:
    """Run each work once a round, in turns and every other round backwards, so that all see the same machine."""
    measured: dict[str, list[Timing]] = {name: [] for name in works}

    for number, name in in_turns(works, rounds, warm_up):
        timing = timed(works[name])
        if number >= 0:
            measured[name].append(timing)

    return measured


def in_turns(names: Iterable[Name], rounds: int, warm_up: int = 0) -> Iterator[tuple[int, Name]]:
    """(round, name): every name once a round, every other round backwards. Rounds that warm up are below 0."""
    forwards = list(names)
    for number in range(-warm_up, rounds):
        for name in forwards if number % 2 == 0 else reversed(forwards):
            yield number, name


def milliseconds(timings: Mapping[str, Sequence[Timing]]) -> dict[str, float]:
    """Median wall time as `NAME_ms`, mean CPU time as `NAME_cpu_ms`."""
    found: dict[str, float] = {}
    for name, values in timings.items():
        found[f"{name}_ms"] = 1e3 * statistics.median(value.wall_s for value in values)
        found[f"{name}_cpu_ms"] = 1e3 * statistics.fmean(value.cpu_s for value in values)

    return found


def family_cpu_s() -> float:
    """CPU seconds so far, of this process and of all below it that live."""
    me = psutil.Process()
    return sum(map(cpu_s_of, (me, *me.children(recursive=True))))


def cpu_s_of(process: psutil.Process) -> float:
    """CPU seconds so far, without those of its children."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@contextmanager
def temporary_run(overrides: Sequence[str] = (), **fields: Any) -> Iterator[RunFile]:
    """A saved run file on the CPU, in a folder that vanishes."""
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as name:
        folder = Path(name)
        values: dict[str, Any] = {
            "config": load_config(None, list(overrides)),
            "run_id": os.urandom(4).hex(),
            "folder": folder,
            "socket_folder": folder,
            "device": "cpu",
            "train_tasks": 1000,
            "eval_tasks": 0,
            "started_at": time.time(),
        }

        run = RunFile.model_validate(values | fields)
        make_curve_key(run.folder)
        run.save()

        yield run


def random_batch_part(
    groups: int, size: int, prompt: int, answers: tuple[int, int], vocabulary: int, *, shared: bool = False
) -> BatchPart:
    """Samples of `prompt` tokens and answers of random length, both ends of the range `answers` included.

    shared: the samples of a group have the same prompt, as those of a run; else each has its own.
    """
    random = np.random.default_rng(0)
    answered = random.integers(answers[0], answers[1] + 1, groups * size)
    return batch_part_of(prompt, answered.tolist(), size, vocabulary, random, shared=shared)


def batch_part_of(
    prompt: int, answered: Sequence[int], size: int, vocabulary: int, random: np.random.Generator, *, shared: bool
) -> BatchPart:
    """Random samples of `prompt` tokens and answers of these lengths, `size` in a group.

    shared: see `random_batch_part`.
    """
    count = len(answered)
    lengths = [prompt + answer for answer in answered]
    mask = np.concatenate([np.repeat(np.array([0, 1], np.uint8), [prompt, answer]) for answer in answered])

    token_ids = random.integers(0, vocabulary, len(mask))
    if shared:
        prompts = random.integers(0, vocabulary, (count // size, prompt)).repeat(size, 0)  # (count, prompt)
        token_ids[mask == 0] = prompts.flatten()

    columns = token_columns(token_ids, mask, logp_behavior=-random.random(len(mask)) * 5, policy_version=0)

    return BatchPart(
        step=0,
        rank=0,
        timeline=0,
        rows=[SampleRow(i, i // size, float(random.random()), lengths[i], answered[i], 0) for i in range(count)],
        members=list(range(count)),
        lengths=lengths,
        turn_starts=[[prompt]] * count,
        columns=columns,
        loss_tokens=sum(answered),
    )

"""How fast a run could have been on two cores: what its samples cost a bare learner and a bare engine, side by side.

    bound = (CPU seconds of the bare learner + CPU seconds of the bare engine) / 2 + start

for the samples of the very run, up to its target, with one thread each. `start` is the run's own: seconds until its
first update began. The first batch is generated in them too, so the bound errs to the run's favour by that batch.
Each side runs in a process of its own (`_bare_learner.py`, `_bare_engine.py`), both at the same time, as a run's two
sides do. Its CPU seconds are those of all its threads and children, without its start and one warm-up batch.

There are two bare learners, and a bound of each. The stock one sorts a step's samples by length and runs them at most
`rows_at_once` at a time, as many as cost least, padded to the longest of those. The sharing one has what Fresco's
learner has: no padding, and a prompt that a group shares once. Fresco may beat the first bound on its learner's side;
the second one is fair there.

What is measured is every k-th step, evenly spread: at most 40 of them and about 200,000 tokens. Both sides are scaled
by tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.compare.job import Job, read_lines
from rl.observe.trace import trace_files
from rl.observe.trace_events import SamplingBegan, SamplingEnded
from rl.wire.run import RunFile
from rollout.generator.engines.environment import engine_environment

AT_MOST = 1.15
"""Times the bound that a run may take."""
_CORES = 2
_MOST_STEPS = 40
_MOST_TOKENS = 200_000
_SIDE_S = 1800
"""A bare side's deadline: it takes minutes for the most tokens."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Step:
    """The samples of one training step; those of a group stand side by side."""

    prompt: int
    """Tokens of each prompt."""
    answers: list[int]
    """Tokens of each answer."""

    @property
    def tokens(self) -> int:
        return self.prompt * len(self.answers) + sum(self.answers)


@dataclass(frozen=True)
class Work:
    """What a bare side is told, as a file."""

    run: str
    """Folder of the run, whose model and settings both sides take."""
    steps: list[Step]
    group_size: int
    rows_at_once: int
    at_once: int
    """Requests that the engine has at a time."""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | Path) -> Work:
        values = json.loads(Path(path).read_text())
        return cls(**(values | {"steps": [Step(**each) for each in values["steps"]]}))


@dataclass(frozen=True)
class Bound:
    """The bound of one run. CPU seconds for the samples of all its steps."""

    start_s: float
    """The seconds of the start, by the clock."""
    stock_s: float
    """The seconds of the learner that pads."""
    shared_s: float
    """The seconds of the learner that has each prompt once."""
    engine_s: float
    every: int
    """Every how many-th step was measured."""
    at_once: int
    """Requests that the run's engine had at most, and the bare one always."""

    @property
    def stock(self) -> float:
        """Seconds to the target."""
        return (self.stock_s + self.engine_s) / _CORES + self.start_s

    @property
    def shared(self) -> float:
        """Seconds to the target."""
        return (self.shared_s + self.engine_s) / _CORES + self.start_s


def bound_of(job: Job, steps: int, start_s: float) -> Bound:
    """The bound of the run of Fresco in `job.folder`, up to so many steps. Raises SystemExit where a bare side
    fails."""
    every, work = work_of(job, steps)
    chosen = work.steps[every // 2 :: every]
    of_all, measured = _tokens(work.steps), _tokens(chosen)

    with tempfile.TemporaryDirectory(prefix="fresco-bound-") as folder:
        path = Path(folder) / "work.json"
        replace(work, steps=chosen).save(path)
        told = _told(work, path)

    stock_s, shared_s = (told[form] * of_all[0] / measured[0] for form in ("stock", "shared"))
    engine_s = told["engine"] * of_all[1] / measured[1]
    return Bound(start_s, stock_s, shared_s, engine_s, every, work.at_once)


def work_of(job: Job, steps: int) -> tuple[int, Work]:
    """Every how many-th of the steps is measured, and the work of all of them."""
    found = steps_of(job)[:steps]
    work = Work(str(job.folder), found, job.group_size, job.rows_at_once, most_at_once(job.folder))
    return every_of(found), work


def every_of(steps: Sequence[Step]) -> int:
    """Every how many-th step is measured, so that at most 40 are, and of long ones fewer."""
    tokens, _answers = _tokens(steps)
    return min(len(steps), max(-(-len(steps) // _MOST_STEPS), -(-tokens // _MOST_TOKENS)))


def steps_of(job: Job) -> list[Step]:
    """What the run's metrics say: each answer's length, and the prompts' mean, which is that of all in these tasks."""
    found = []
    for line in read_lines(job.folder / "metrics.jsonl"):
        if "train/loss" not in line:
            continue
        answers = [round(length) for length in line["histogram/length"]]
        prompts = line["tokens/trained"] - sum(answers)
        found.append(Step(round(prompts / len(answers)), answers))
    return found


def most_at_once(run: Path) -> int:
    """Requests that the run's engines had at a time, as its trace says."""
    running: set[tuple[str, int]] = set()
    most = 1
    for file in trace_files(run):
        for _, event in file.read():
            if isinstance(event, SamplingBegan):
                running.add((str(file.source), event.request))
            elif isinstance(event, SamplingEnded):
                running.discard((str(file.source), event.request))
            most = max(most, len(running))
    return most


def _tokens(steps: Sequence[Step]) -> tuple[int, int]:
    """All of them, and those of the answers: what a learner's and what an engine's seconds are scaled by."""
    return sum(step.tokens for step in steps), sum(sum(step.answers) for step in steps)


def _told(work: Work, path: Path, sides: Sequence[str] = ("_bare_learner", "_bare_engine")) -> dict[str, float]:
    """CPU seconds by name: the last line of each bare side. They run at the same time, which is what the bound says.

    One after the other each would have the machine to itself, which a run's sides have not.
    Raises SystemExit where one fails; the other ends with it.
    """
    config = RunFile.load(work.run).config
    environment = os.environ | engine_environment(config, "cpu")
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": str(_ROOT)}
    environment |= {"FRESCO_PARENT_PID": str(os.getpid())}

    out = {side: path.with_name(f"{side}.out") for side in sides}
    errors = {side: path.with_name(f"{side}.err") for side in sides}
    running: dict[str, subprocess.Popen[bytes]] = {}
    ends_s = time.monotonic() + _SIDE_S
    try:
        for side in sides:
            command = [sys.executable, "-m", f"experiments.bench.{side}", str(path)]
            with out[side].open("wb") as stdout, errors[side].open("wb") as stderr:
                running[side] = subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr)

        told: dict[str, float] = {}
        for side, process in running.items():
            if code := process.wait(max(0.0, ends_s - time.monotonic())):
                raise SystemExit(f"{side} ended with {code}:\n{errors[side].read_text(errors='replace')[-4000:]}")
            told |= json.loads(out[side].read_text().splitlines()[-1])
        return told

    except subprocess.TimeoutExpired:
        raise SystemExit(f"{side} has not ended within {_SIDE_S} s") from None
    finally:
        for process in running.values():
            process.kill()
            process.wait()

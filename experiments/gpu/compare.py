"""Fresco beside TRL's GRPOTrainer on one GPU, and asynchronous beside synchronous training: seconds to a score.

Each side trains the same start model three times, one behind the other, in an engine that starts once. Fresco's learner
is ended when a repeat is over: its successor begins from the start model, while engine and environments stay up. TRL
takes its weights back, and forgets its optimizer's states. Seconds count from when the first batch of a repeat is
there, and the start is told apart. A repeat ends at the target, or after the same seconds on all sides.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from experiments.bench._processes import Watched, watched
from experiments.compare import fresco, trl
from experiments.compare.job import WINDOW, Job, Row, began, has_ended, reached_at
from experiments.compare.start_model import ensure_start_model
from experiments.compare.tasks import TASKS, Task, job_of
from experiments.gpu.part import Result, Unrun, need_vllm
from rl.learner.changes import CHANGES, Change
from rl.store.made_once import cache_folder, digest, made_once

PACKAGES: tuple[str, ...] = ("accelerate", "datasets", "dill", "fsspec", "multiprocess", "pandas", "pyarrow")
PACKAGES += ("python-dateutil", "trl", "tzdata", "xxhash")
"""What TRL needs beside what Fresco has."""
SITE = "site-packages"
"""The name of their folder: in another one dill, by which `datasets` tells data apart, takes them for data as well."""
_ROOT = Path(__file__).parents[2]
_PATIENCE_S = 20.0
_START_S = 200.0  # until the first batch of a repeat is there
_LOOK_S = 0.1
_LOOKED_AT_S = (5, 10, 20)
_MORE = 100  # steps: a run of Fresco's that has made all of them would end before its next repeat

_LR = {"addition": 3e-4, "long": 2e-4}  # of both sides: found with the same effort, on CPUs
_TARGET = {"addition": 0.5, "long": 0.4}
_SIDES = {"fresco, α = 1": "rollout.alpha=1", "trl": "", "fresco, α = 0": "rollout.alpha=0"}
_CURVES = {f"α = {alpha}": f"rollout.alpha={alpha}" for alpha in (1, 0)}

Points = Callable[[Sequence[Row]], list[tuple[float, float]]]


def compare_short(result: Result, device: str) -> None:
    """Two-digit addition: answers of at most 16 tokens."""
    _compare(result, device, TASKS["addition"])


def compare_long(result: Result, device: str) -> None:
    """The same behind a long tail of thinking: answers of 13 to 506 tokens."""
    _compare(result, device, TASKS["long"])


def curve(result: Result, device: str) -> None:
    """Held-out accuracy on arithmetic over seconds."""
    need_vllm()
    steps = 60 if device == "cuda" else 4
    for name, alpha in _CURVES.items():
        with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder, result.case(f"{name}, failed"):
            no_path = Path()  # model and questions are the recipe's own
            fields = {"seed": 0, "lr": 1e-4, "groups": 16, "group_size": 8, "max_tokens": 24, "rows_at_once": 1}
            job = Job(Path(folder) / "run", no_path, no_path, steps=steps, **fields)  # type: ignore[arg-type]
            job = replace(job, repeats=_repeats(device), patience_s=_PATIENCE_S, device=device)

            chosen: dict[str, object] = {"runs": folder, "name": "run", "steps": steps + _MORE}
            chosen |= {"generator.count": 1, "learner.ranks": 1, "tracking.wandb": "disabled"}
            if device == "cuda":
                chosen |= fresco.ON_GPU | {"eval.every": 4, "eval.tasks": 256}
            else:
                chosen |= {"eval.every": 2, "eval.tasks": 4, "rollout.groups_per_batch": 2}

            settings = [f"{key}={value}" for key, value in chosen.items()]
            command = [sys.executable, "-m", "launch.cli", "run", fresco.RECIPE, *settings, alpha]
            points = partial(held_out, job.folder / "metrics.jsonl")
            _repeated(result, name, fresco, job, command, os.environ, points)


def _compare(result: Result, device: str, task: Task) -> None:
    """All sides, each after the end of the one before."""
    need_vllm()
    packages = trl_packages()
    (of_trl,) = importlib.metadata.distributions(name="trl", path=[str(packages)])
    result.note("trl_version", of_trl.version)

    if device == "cpu":  # a few tokens of a model that has learnt nothing
        task = replace(task, thinking=min(task.thinking, 12), max_tokens=min(task.max_tokens, 32))
        task = replace(task, sft_steps=2, sft_batch=8, sft_parts=1, groups=2, group_size=4)
    model = ensure_start_model(task)

    for name, alpha in _SIDES.items():
        with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder, result.case(f"{name}, failed"):
            _side(result, name, alpha, _job(Path(folder) / "run", task, model, device), packages)


def _job(folder: Path, task: Task, model: Path, device: str) -> Job:
    job = job_of(task, folder, model, 0, lr=_LR[task.name], steps=150 if device == "cuda" else WINDOW)
    target = _TARGET[task.name] if device == "cuda" else 1.0
    return replace(job, repeats=_repeats(device), target=target, patience_s=_PATIENCE_S, device=device)


def _side(result: Result, name: str, alpha: str, job: Job, packages: Path) -> None:
    """alpha: the setting of Fresco's; empty: it is TRL's turn."""
    if alpha:
        command = [*fresco.command(job, sys.executable), f"steps={job.steps + _MORE}", alpha]
        _repeated(result, name, fresco, job, command, os.environ)
    else:
        job = replace(job, rows_at_once=job.groups * job.group_size)  # one forward holds all
        _repeated(result, name, trl, job, trl.command(job, sys.executable), _with(packages))


def _repeats(device: str) -> int:
    return 3 if device == "cuda" else 2


def _repeated(
    result: Result,
    name: str,
    trainer: ModuleType,
    job: Job,
    command: Sequence[str],
    environment: Mapping[str, str],
    points: Points | None = None,
) -> None:
    """Note every repeat as soon as it is over. Raises SystemExit where one fails."""
    points = points or _scores
    told: list[dict[str, Any]] = []

    with watched(command, job.folder.with_suffix(".log"), environment) as watch:
        since = watch.origin
        for repeat in range(job.repeats):
            rows = _of_repeat(trainer, job, repeat, watch)
            if trainer is fresco and repeat + 1 < job.repeats:
                _begin_anew(job, watch, repeat)

            told.append(_told(job, rows) | {"start_s": began(rows) - since, "points": points(rows)})
            result.note(name, {"repeats": told} | summary(told))
            since = rows[-1].time


def _of_repeat(trainer: ModuleType, job: Job, repeat: int, watch: Watched) -> list[Row]:
    """The rows of a repeat that is over."""
    begin = time.monotonic()
    while True:
        running = watch.running
        rows = [row for row in trainer.rows(job) if row.repeat == repeat]
        if has_ended(job, rows):
            return rows[: job.steps]  # more were made between two looks

        if not running:
            watch.fail(f"it ended after {len(rows)} steps of repeat {repeat}")
        if time.monotonic() - begin > _START_S + 2 * _PATIENCE_S:
            watch.fail(f"repeat {repeat} has made {len(rows)} steps in {time.monotonic() - begin:.0f} s")
        time.sleep(_LOOK_S)


def _begin_anew(job: Job, watch: Watched, repeat: int) -> None:
    """End the learner of this incarnation. Its successor finds an undo that was begun, to the start model: it publishes
    that in a new timeline, and all that was sampled later is void. Else it would train the same batches again."""
    undo = Change(0, repeat + 1, undo=0)
    with (job.folder / CHANGES).open("ab") as file:
        file.write(msgspec.json.encode(undo) + b"\n")

    watch.kill_learner(repeat)


def _told(job: Job, rows: Sequence[Row]) -> dict[str, Any]:
    """A repeat in numbers. Without the first step, which also loads kernels, seconds a step are a median."""
    times = [began(rows), *(row.time for row in rows)]
    steps = [after - before for before, after in itertools.pairwise(times)]
    reached = reached_at([row.accuracy for row in rows], job.target)
    return {
        "steps": reached or len(rows),
        "to_target_s": rows[reached - 1].time - times[0] if reached else None,
        "score": statistics.fmean(row.accuracy for row in rows[-WINDOW:]),
        "step_s": statistics.median(steps[1:] or steps),
        "tokens_per_s": sum(row.tokens for row in rows) / (times[-1] - times[0]),
    }


def summary(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The seconds of each repeat to the target as a text, and by seconds the median of the scores that were there."""
    reached = [each["to_target_s"] for each in repeats]
    there = {
        f"after_{seconds}_s": [[score for at, score in each["points"] if at <= seconds][-1:] for each in repeats]
        for seconds in _LOOKED_AT_S
    }
    none = [name for name, found in there.items() if not all(found)]
    return {
        **({"unrun": f"no score was there: {', '.join(none)}"} if none else {}),
        "to_target_s": ", ".join("–" if each is None else f"{each:.1f}" for each in reached),
        "step_s": statistics.median(each["step_s"] for each in repeats),
        **{name: statistics.median(score for (score,) in found) for name, found in there.items() if all(found)},
    }


def _scores(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(seconds, mean accuracy of the last five training steps)."""
    begin = began(rows)
    means = [statistics.fmean(row.accuracy for row in rows[max(0, n - WINDOW) : n]) for n in range(1, len(rows) + 1)]
    return [(round(row.time - begin, 2), round(mean, 4)) for row, mean in zip(rows, means, strict=True)]


def held_out(metrics: Path, rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(seconds, held-out accuracy) of a repeat with these training rows."""
    begin = began(rows)
    told = [json.loads(line) for line in metrics.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    found = [row for row in told if "eval/accuracy" in row and row["step"] > 0 and begin < row["time"] <= rows[-1].time]
    return [(round(row["time"] - begin, 2), round(row["eval/accuracy"], 4)) for row in found]


def trl_packages() -> Path:
    """The folder of TRL's packages: FRESCO_TRL, or one of the cache, which the first call makes. Raises Unrun."""
    if told := os.environ.get("FRESCO_TRL"):
        if not (Path(told) / "trl").exists():
            raise Unrun(f"FRESCO_TRL={told} has no TRL; --bundle FOLDER makes FOLDER-trl, whose go.sh unpacks it")
        return Path(told)

    pins = pins_of(PACKAGES)
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", *pins, "--target"]
    try:
        folder = made_once(
            cache_folder() / f"trl-{digest(' '.join([SITE, *pins]))}",
            lambda draft: subprocess.run([*install, str(draft / SITE)], check=True),
        )
        return folder / SITE
    except subprocess.CalledProcessError:
        raise Unrun("TRL could not be installed; --bundle FOLDER makes what an offline machine lacks") from None


def pins_of(names: Sequence[str]) -> list[str]:
    """As `bench compare` pins them."""
    lines = (_ROOT / trl.PINS).read_text().splitlines()
    return [line for line in lines if line.partition("==")[0] in names]


def _with(packages: Path) -> dict[str, str]:
    """The environment of TRL's process, whose engine is in the process itself."""
    path = [str(packages), str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return os.environ | own | {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1"}

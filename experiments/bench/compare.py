"""Fresco beside another trainer: seconds to an accuracy, and where they go.

    python -m experiments.bench compare trl [--task addition | long] [--pairs 5] [--target 0.8]
                                            [--tune 5e-5 1e-4 2e-4] [--patience 10] [--keep FILE.jsonl]
                                            [--out FILE.json]

Same start model, questions in the same order, reward, samples of a step, tokens and loss (`experiments/compare/`). The
sides take turns, a seed for each pair. A side has reached the target when the mean accuracy of its last five training
steps has; its seconds count from its command, with every import and start. `--tune` gives both sides the same effort:
each tries each learning rate once, on a seed of its own, and keeps the one that got there first.

Where the other trainer would need hours, `--patience 10` stops it after ten times the seconds that Fresco has taken
with the same seed, and Fresco is always first. The ratio is then a bound: it is at most what is printed. With `--keep`
each pair is written down when it has been trained, and a later call goes on behind it, with the same settings and code.

Two cores bound what any system can do, so each run of Fresco that reached the target has a bound, measured right after
it. The bound is half the CPU seconds that a bare learner and a bare engine need for the same samples, plus its own
start. A run may take 1.15 times that. `experiments/bench/_bound.py` says what is measured; there is a harder bound
beside it, whose learner computes a group's prompt once, as Fresco's does. Where a run is below its bound, the bound is
wrong, and that is printed.

The other trainer lives in a virtual environment of its own under Fresco's cache, which the first call makes (about
1.5 GB). The CPU build of torch comes from where pip finds it; see the README.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from rich.console import Console
from rich.table import Table

from experiments.bench._bound import bound_of
from experiments.bench._bound_report import bound_report, tell_bound
from experiments.bench._measuring import Timing, parser_of, write
from experiments.bench._outcome import RunResult
from experiments.bench._pairs import Pair, pairs_of
from experiments.bench._processes import free_of_threads, watched
from experiments.bench._ratios import Idle, Ratio, machine, provenance, ratio_of
from experiments.compare.fresco import RECIPE
from experiments.compare.job import WINDOW, Job, Row, reached_at
from experiments.compare.start_model import ensure_start_model
from experiments.compare.tasks import TASKS, job_of, most_steps
from rl.store.made_once import cache_folder, digest, to_stderr

_ROOT = Path(__file__).parents[2]
_TUNING_SEED = 1000
_LOOK_S = 0.5  # rows carry their own time: a look is seldom, because it takes a core from what it looks at
_AT_MOST = {"addition": 0.5, "long": 0.1}
"""The most that may be needed, as a share of the other trainer's seconds."""
_BARE = tuple(f"experiments/bench/{name}.py" for name in ("_bare_engine", "_bare_learner", "_bare_loop", "_bound"))
_RUN = ("algos", "envs", "experiments/compare", f"experiments/{RECIPE}.yaml", "launch", "requirements", "rl", "rollout")


class Trainer(Protocol):
    """A module of `experiments/compare/`; its docstring says more."""

    PINS: str

    def command(self, job: Job, python: str) -> list[str]: ...

    def rows(self, job: Job) -> list[Row]: ...


def main(argv: list[str]) -> None:
    options = _options(argv)
    task = TASKS[options.task]
    names = ["fresco", options.trainer]
    trainers = {name: _trainer(name) for name in names}
    pythons = {name: str(_python(trainer)) for name, trainer in trainers.items()}
    model = ensure_start_model(task)

    def run(name: str, seed: int, lr: float, *, limit_s: float = math.inf, bounded: bool = False) -> RunResult:
        with tempfile.TemporaryDirectory(prefix="fresco-compare-") as folder:
            job = job_of(task, Path(folder) / "run", model, seed, lr=lr, steps=options.steps)
            outcome = _train(trainers[name], job, pythons[name], options.target, limit_s)
            _tell(name, seed, lr, outcome)
            return _with_bound(job, outcome) if bounded and outcome.reached else outcome

    tried = {name: {lr: run(name, _TUNING_SEED, lr) for lr in options.tune} for name in names}
    rates = {name: _best(tried[name], options.lr) for name in names}

    settings = _settings(options, rates)

    def pair(seed: int) -> Pair:
        fresco_first = seed % 2 == 0 or options.patience < math.inf
        runs: dict[str, RunResult] = {}
        limit_s = math.inf

        with Idle() as idle:
            for name in names if fresco_first else reversed(names):
                runs[name] = run(name, seed, rates[name], limit_s=limit_s, bounded=name == "fresco")
                limit_s = options.patience * runs[name].wall_s
        return Pair(seed, settings, round(idle.others, 3), runs)

    pairs = pairs_of(options.pairs, pair, settings, options.keep)
    outcomes = {name: [each.runs[name] for each in pairs] for name in names}
    idle = Idle()
    idle.others = max(each.others for each in pairs)

    write(options.out, _report(options, rates, outcomes, idle))


def _options(argv: list[str]) -> argparse.Namespace:
    found = sorted(path.stem for path in (_ROOT / "experiments" / "compare").glob("[!_]*.py"))
    trainers = [name for name in found if name != "fresco" and hasattr(_trainer(name), "PINS")]
    parser = parser_of("compare", __doc__)
    parser.add_argument("trainer", choices=trainers)
    parser.add_argument("--task", choices=sorted(TASKS), default="addition")
    parser.add_argument("--pairs", type=int, default=5, help="seeds, each trained by both sides")
    parser.add_argument("--target", type=float, default=0.8, help=f"mean accuracy of {WINDOW} training steps")
    parser.add_argument("--steps", type=int, default=500, help="at most")
    parser.add_argument("--lr", type=float, default=3e-4, help="of both sides, where nothing is tuned")
    parser.add_argument("--tune", type=float, nargs="*", default=[], metavar="LR")
    parser.add_argument("--patience", type=float, default=math.inf, help="of the other, in Fresco's seconds")
    parser.add_argument("--keep", type=Path, metavar="FILE.jsonl", help="of finished pairs, to go on from")

    options = parser.parse_args(argv)
    most = most_steps(TASKS[options.task])
    if options.steps > most:
        parser.error(f"--steps {options.steps}: there are new questions for {most}")
    if options.keep and options.tune:
        parser.error("--keep with --tune: tune first, then give --lr what it has found")
    if options.keep and not options.keep.parent.is_dir():
        parser.error(f"--keep {options.keep}: there is no folder {options.keep.parent}; make it first")
    return options


def _settings(options: argparse.Namespace, rates: Mapping[str, float]) -> dict[str, str]:
    """What pairs must have in common to be compared."""
    told = {name: str(getattr(options, name)) for name in ("trainer", "task", "target", "steps", "patience")}
    told |= {f"lr of {name}": f"{lr:g}" for name, lr in rates.items()}
    return told | {"code": _code(_ROOT), "machine": machine()}


def _code(root: Path) -> str:
    """A digest of what a pair runs: both trainers, the recipe, the packages that they are installed with, the bound."""
    found = [path for each in (*_RUN, *_BARE) for path in [root / each, *(root / each).rglob("*")]]
    return digest("", *sorted(path for path in found if path.suffix in {".py", ".sh", ".txt", ".yaml"}))


def _trainer(name: str) -> Trainer:
    return cast(Trainer, import_module(f"experiments.compare.{name}"))


def _python(trainer: Trainer) -> Path:
    """The interpreter of its environment, made first where it has none."""
    if not trainer.PINS:
        return Path(sys.executable)

    pins = _ROOT / trainer.PINS
    folder = cache_folder() / "environments" / f"{pins.stem}-{digest('', pins)}"
    if not (folder / "complete").exists():
        to_stderr(f"making {folder} from {trainer.PINS} (once; minutes) ...")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        install = [str(folder / "bin" / "pip"), "install", "--quiet", "--no-deps", "-r", str(pins)]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return folder / "bin" / "python"


def _train(trainer: Trainer, job: Job, python: str, target: float, limit_s: float) -> RunResult:
    """Train until the target is reached, all steps are done, or a step ends too late. Raises SystemExit if it ends
    before."""
    environment = free_of_threads() | {"PYTHONPATH": str(_ROOT)}
    output = job.folder.with_suffix(".log")
    given_up_s = None

    with watched(trainer.command(job, python), output, environment) as watch:
        while True:
            running = watch.running
            rows = trainer.rows(job)
            reached = reached_at([row.accuracy for row in rows], target)

            if reached is not None or len(rows) >= job.steps:
                break
            if rows and watch.elapsed_s > limit_s:
                given_up_s = watch.elapsed_s
                break
            if not running:
                watch.fail(f"it ended after {len(rows)} steps")
            time.sleep(_LOOK_S)

    return RunResult(rows, watch.origin, reached, watch.cpu_s, watch.used, given_up_s=given_up_s)


def _with_bound(job: Job, outcome: RunResult) -> RunResult:
    """The same, with what its samples cost bare sides, measured now."""
    assert outcome.reached is not None
    bound = bound_of(job, outcome.reached, outcome.seconds()["start"])
    tell_bound(bound)
    return replace(outcome, bound=bound)


def _best(tried: Mapping[float, RunResult], otherwise: float) -> float:
    """The learning rate that got there first; of those that did not, the one with the best end."""
    if not tried:
        return otherwise

    def order(lr: float) -> tuple[bool, float]:
        outcome = tried[lr]
        if outcome.reached is not None:
            return False, outcome.wall_s
        return True, -statistics.fmean(row.accuracy for row in outcome.rows[-WINDOW:])

    return min(tried, key=order)


def _tell(name: str, seed: int, lr: float, outcome: RunResult) -> None:
    how = f"after {outcome.wall_s:.1f} s, {outcome.reached} steps" if outcome.reached else "not reached"
    if outcome.given_up_s:
        how += f" when it was stopped after {outcome.given_up_s:.0f} s"
    end = statistics.fmean(row.accuracy for row in outcome.rows[-WINDOW:])
    print(f"{name} seed {seed} lr {lr:g}: {how}; {outcome.cpu_s:.0f} CPU s, accuracy {end:.2f}", flush=True)


def _report(
    options: argparse.Namespace, rates: dict[str, float], outcomes: dict[str, list[RunResult]], idle: Idle
) -> dict[str, Any]:
    """Print the tables and the verdict; the same as a result."""
    medians = {name: _medians(each) for name, each in outcomes.items()}
    table = Table("where the seconds go", *outcomes, title=f"{options.task}: medians of {options.pairs} seeds")
    for part in dict.fromkeys(part for each in medians.values() for part in each):
        table.add_row(part, *(f"{each[part]:.2f}" if part in each else "" for each in medians.values()))
    Console(highlight=False).print(table)

    result: dict[str, Any] = {"task": options.task, "target": options.target, "lr": rates, "medians": medians}
    result["to_target_s"] = {
        name: [outcome.wall_s if outcome.reached else None for outcome in each] for name, each in outcomes.items()
    }
    ratios: dict[str, Ratio] = {}
    ours = outcomes["fresco"]
    if all(outcome.bound for outcome in ours):
        result["bound"], ratios = bound_report(ours, idle)

    pairs = list(zip(ours, outcomes[options.trainer], strict=True))
    result["steps_to_target"] = {name: [outcome.reached for outcome in each] for name, each in outcomes.items()}
    result["ahead"] = sum(mine.is_ahead_of(theirs) for mine, theirs in pairs)
    print(f"fresco is ahead in {result['ahead']} of {options.pairs} pairs")

    if not all(mine.reached and (theirs.reached or theirs.given_up_s) for mine, theirs in pairs):
        print("no verdict: a side did not reach the target")
        return result | provenance(idle, ratios)

    timings = {name: [Timing(each.wall_s, each.cpu_s) for each in ended] for name, ended in outcomes.items()}
    ratio = ratio_of(timings["fresco"], timings[options.trainer])
    result["stopped"] = sum(theirs.given_up_s is not None for _, theirs in pairs)
    result["verdict"] = ratio.verdict(at_most=_AT_MOST[options.task], of="wall", idle=idle)
    if result["stopped"] and result["verdict"].startswith("missed"):
        result["verdict"] = "no verdict: the other was stopped too soon for one"

    print(f"fresco over {options.trainer}, to the target: {'at most ' if result['stopped'] else ''}{ratio}")
    print(result["verdict"])
    return result | provenance(idle, ratios | {f"fresco over {options.trainer}": ratio})


def _medians(outcomes: Sequence[RunResult]) -> dict[str, float]:
    """Seconds of each part, and what they add up to."""
    spent = [outcome.seconds() for outcome in outcomes]
    steps = [len(outcome.rows[: outcome.reached]) for outcome in outcomes]
    found = {part: statistics.median(each[part] for each in spent) for part in spent[0]}

    found["to the target"] = statistics.median(outcome.wall_s for outcome in outcomes)
    found["CPU seconds"] = statistics.median(outcome.cpu_s for outcome in outcomes)
    found["steps"] = statistics.median(steps)
    found["seconds a step"] = statistics.median(
        (outcome.wall_s - each["start"]) / count for outcome, each, count in zip(outcomes, spent, steps, strict=True)
    )
    return found

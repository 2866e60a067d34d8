"""`fresco eval`: success of a checkpoint or model on held-out tasks, through the very rollout path of training.

It is a run of 0 steps: the learner publishes the weights, generators load them, environment servers play the
episodes, the broker keeps each result (`<run>/evals.jsonl`). Greedy and sampled are two such runs, over the same tasks.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.table import Table

from envs.registry import load_family, make_family, validate_options
from launch.commands.run import execute
from launch.cpu.fork_server import begin_as_copies
from launch.preflight import check, make_run
from launch.refusing import Refusing
from launch.report.tasks import rates as rates_of
from launch.report.tasks import types_of
from launch.terminal import CleanConsole
from rl.config.damage import read_lines
from rl.config.recipes import SHIPPED
from rl.config.schema import Config, ConfigError, ModelConfig, load_config
from rl.store.checkpoint_folder import CheckpointError, latest, read_meta, verify
from rl.wire.run import RunFile

ALL = "all"


@dataclass(frozen=True)
class Target:
    """What is evaluated: a checkpoint or a model, and the run that it came from, if any."""

    path: str
    is_checkpoint: bool
    run: Path | None


class EpisodeResult(msgspec.Struct):
    """One line of `evals.jsonl`; `label` is its task's type (`all` where the environment knows none)."""

    task_index: int
    success: float
    reward: float
    turns: int
    length: int
    version: int
    label: str = ALL
    info: dict[str, float] = {}
    sample: int = 0


class SuccessRow(msgspec.Struct):
    """One line of the table; `low` and `high` are the 95 % interval of the success rate over tasks. With one sample a
    task it is Wilson's."""

    label: str
    episodes: int
    success: float
    low: float
    high: float
    turns: float
    length: float
    passed: dict[str, tuple[float, float, float]] = {}
    """pass@k with its interval over tasks, where tasks have several samples."""


def evaluate(arguments: argparse.Namespace) -> int:
    """Run and print the tables. Returns the exit code; raises ConfigError, before anything starts."""
    targets = [arguments.target, *(item for item in arguments.overrides if "=" not in item)]
    arguments.overrides = [item for item in arguments.overrides if "=" in item]
    configs = [configure(target, arguments) for target in targets]
    reports: list[dict[str, Any]] = []
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.open("ab").close()  # minutes before something is written to it

    for target, config in zip(targets, configs, strict=True):
        runs: list[dict[str, Any]] = []
        if code := _evaluate(target, config, arguments, runs):
            return code
        reports.append({"target": target, "env": config.env.name, "split": arguments.split, "runs": runs})

    if len(reports) > 1:
        print_comparison(reports)
    if arguments.out:
        told = reports[0] if len(reports) == 1 else reports
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=1) + b"\n")
    return 0


def _evaluate(target: str, config: Config, arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> int:
    """A run for each temperature. Returns the exit code of the first that fails, else 0."""
    for temperature in arguments.temperatures:
        samples = config.eval.samples if temperature else 1  # greedy ones are all the same
        section = config.eval.model_copy(update={"temperature": temperature, "samples": samples})
        settings = config.model_copy(update={"eval": section})
        with begin_as_copies(settings) as begin:
            checked = check(settings, dry=False, begin=begin)
            run = make_run(checked, time.time())
            if code := execute(run, checked, begin):
                return code

        episodes = read_episodes(config, run.folder)
        rows = summarise(episodes)
        runs.append({"temperature": temperature, "rows": rows, "episodes": episodes})
        how = f"temperature {temperature:g}" if temperature else "greedy"
        print_table(rows, f"{target}, {arguments.split or arguments.data or 'held-out'} tasks, {how}")
    return 0


def configure(name: str, arguments: argparse.Namespace) -> Config:
    """The evaluation's configuration: that of the target's own run, else of the environment's recipe.

    Raises ConfigError, one line, where target, environment, split or number of episodes do not fit.
    """
    target = find_target(name)
    config = load_config(_recipe(name, arguments, target), [*_overrides(arguments), *arguments.overrides])
    _check_source(config, arguments)
    available = make_family(config).task_count("eval")
    tasks = available if arguments.episodes is None else arguments.episodes
    if not 1 <= tasks <= available:
        raise ConfigError(f"--episodes {tasks}: env {config.env.name!r} has {available} held-out tasks here")

    folder = _started_from(target) if target.is_checkpoint else target.path
    model = config.model if folder is None else ModelConfig(path=folder, dtype=config.model.dtype)
    changes = {
        "resume": Path(target.path) if target.is_checkpoint else None,
        "model": model.model_copy(update={"lora": _lora_of(target)}),
        "eval": config.eval.model_copy(update={"tasks": tasks, "every": 0}),
    }
    return config.model_copy(update=changes)


def _overrides(arguments: argparse.Namespace) -> list[str]:
    found = ["steps=0", "name=eval", "tracking.wandb=disabled", "tracking.replay=off"]
    if arguments.split is not None:
        found.append(f"env.options.eval_split={arguments.split}")
    if sampled := max(arguments.temperatures):
        found.append(f"eval.temperature={sampled:g}")
    if arguments.data is not None:
        data = str(Path(arguments.data).absolute()) if Path(arguments.data).exists() else arguments.data
        found += [f"env.options.eval_source={data}", "eval.sets={}"]
    return found


def _check_source(config: Config, arguments: argparse.Namespace) -> None:
    """Raises ConfigError where the environment has no such split, or plays no rows."""
    env = config.env.name
    fields = load_family(env).Options.model_fields
    if arguments.data is not None and "eval_source" not in fields:
        raise ConfigError(f"--data {arguments.data}: env {env!r} plays no rows; name one that does with --env")
    if arguments.split is not None and "eval_split" not in fields:
        raise ConfigError(f"--split {arguments.split}: env {env!r} has no splits to choose from")

    source = str(getattr(validate_options(config), "source", None) or "")
    if arguments.split is not None and source and ("/" not in source or Path(source).exists()):
        raise ConfigError(
            f"--split {arguments.split}: env.options.source={source!r} has no splits, only held-out tasks"
        )


def find_target(text: str) -> Target:
    """A checkpoint folder, a run's folder (its newest checkpoint), a model folder or a hub name."""
    path = Path(text).absolute()
    if (path / "meta.json").exists():
        with Refusing("", CheckpointError):
            verify(path)
        return Target(str(path), True, _run_of(path.parent.parent))

    if (path / "checkpoints").is_dir():
        checkpoint = latest(path / "checkpoints")
        if checkpoint is None:
            raise ConfigError(f"{text!r} is a run without a complete checkpoint")
        return replace(find_target(str(checkpoint)), run=_run_of(path))

    if path.exists() and not (path / "config.json").exists():
        raise ConfigError(f"{text!r} is neither a checkpoint (meta.json) nor a model folder (config.json)")
    return Target(str(path) if path.exists() else text, False, _run_of(path.parent))


def _lora_of(target: Target) -> dict[str, Any] | None:
    """The adapters of a checkpoint; a model has none."""
    return read_meta(Path(target.path)).lora_options if target.is_checkpoint else None


def read_episodes(config: Config, run: Path) -> list[EpisodeResult]:
    """The results of the newest evaluation in a run's folder, by task."""
    results = list(read_lines(run / "evals.jsonl", EpisodeResult))
    newest = max(result.version for result in results)
    results = [result for result in results if result.version == newest]

    family = make_family(config)
    for result in results:
        kind = getattr(family.task("eval", result.task_index), "task_type", "")
        result.label = result.label or str(kind) or ", ".join(types_of(result.info)) or ALL
    return results


def summarise(episodes: Sequence[EpisodeResult]) -> list[SuccessRow]:
    """One row per task type, in alphabetical order, then all of them together."""
    labels = sorted({episode.label for episode in episodes} - {ALL})
    by_label = [_row(label, [episode for episode in episodes if episode.label == label]) for label in labels]
    return [*by_label, _row(ALL, episodes)]


def print_table(rows: Sequence[SuccessRow], title: str) -> None:
    passed = list(rows[-1].passed)
    table = Table("tasks", "episodes", "success", "95 % interval", *passed, "turns", "tokens", title=title)
    for row in rows:
        means = f"{row.turns:.1f}", f"{row.length:.1f}"
        table.add_row(row.label, str(row.episodes), *_rates(row, passed), *means)

    CleanConsole(highlight=False).print(table)


def print_comparison(reports: Sequence[dict[str, Any]]) -> None:
    """One line for each target and temperature."""
    runs = [(report["target"], run) for report in reports for run in report["runs"]]
    passed = list(runs[-1][1]["rows"][-1].passed)
    table = Table("target", "temperature", "episodes", "success", "95 % interval", *passed, title="all tasks")
    for target, run in runs:
        row = run["rows"][-1]
        table.add_row(target, f"{run['temperature']:g}", str(row.episodes), *_rates(row, passed))

    CleanConsole(highlight=False).print(table)


def _rates(row: SuccessRow, names: Sequence[str]) -> list[str]:
    """The success and its interval, then each pass@k with its own."""
    passed = [row.passed.get(name) for name in names]
    told = ["" if rate is None else f"{rate[0]:.3f} ({rate[1]:.3f} - {rate[2]:.3f})" for rate in passed]
    return [f"{row.success:.3f}", f"{row.low:.3f} - {row.high:.3f}", *told]


def _row(label: str, episodes: Sequence[EpisodeResult]) -> SuccessRow:
    rates = rates_of([msgspec.structs.asdict(episode) for episode in episodes])
    turns = fmean(episode.turns for episode in episodes)
    length = fmean(episode.length for episode in episodes)
    return SuccessRow(label, len(episodes), *rates.pop("avg"), turns, length, rates)


def _recipe(name: str, arguments: argparse.Namespace, target: Target) -> Path:
    """Named, or that of the run that the target came from, or `experiments/<env>_cpu.yaml`."""
    env: str | None = arguments.env
    named: Path | None = arguments.recipe
    if named is not None:
        return named
    if target.run is not None:
        own = target.run / "config.yaml"
        if env is None or load_config(own).env.name == env:
            return own
    if env is None:
        raise ConfigError(f"{name!r} comes from no run: name the environment with --env")

    recipe = SHIPPED / f"{env}_cpu.yaml"
    if not recipe.exists():
        known = ", ".join(sorted(path.name.removesuffix("_cpu.yaml") for path in SHIPPED.glob("*_cpu.yaml")))
        raise ConfigError(f"--env {env!r} has no recipe of its own ({known} have): name one with --recipe")
    return recipe


def _run_of(folder: Path) -> Path | None:
    return folder if (folder / "config.yaml").exists() and (folder / "run.json").exists() else None


def _started_from(target: Target) -> str | None:
    """The model folder that the checkpoint's run began with: its tokenizer and shape are the checkpoint's."""
    if target.run is None:
        return None
    folder = RunFile.load(target.run).model_folder
    return str(folder) if folder is not None and folder.exists() else None

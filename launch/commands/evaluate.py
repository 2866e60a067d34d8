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
from typing import Any

import msgspec
from rich.table import Table

from envs.registry import load_family, make_family, validate_options
from launch.commands.run import execute
from launch.cpu.fork_server import begin_as_copies
from launch.preflight import check, make_run
from launch.terminal import CleanConsole
from rl.config.recipes import SHIPPED
from rl.config.schema import Config, ConfigError, ModelConfig, load_config
from rl.observe.intervals import wilson
from rl.store.checkpoint_folder import CheckpointError, latest, verify
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


class SuccessRow(msgspec.Struct):
    """One line of the table; `low` and `high` are Wilson's 95 % interval of the success rate."""

    label: str
    episodes: int
    success: float
    low: float
    high: float
    turns: float
    length: float


def evaluate(arguments: argparse.Namespace) -> int:
    """Run and print the tables. Returns the exit code; raises ConfigError."""
    config = configure(arguments)
    runs: list[dict[str, Any]] = []

    for temperature in arguments.temperatures:
        section = config.eval.model_copy(update={"temperature": temperature})
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
        print_table(rows, f"{arguments.target}, {arguments.split or 'held-out'} tasks, {how}")

    if arguments.out:
        report = {"target": arguments.target, "env": config.env.name, "split": arguments.split, "runs": runs}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    return 0


def configure(arguments: argparse.Namespace) -> Config:
    """The evaluation's configuration: that of the target's own run, else of the environment's recipe.

    Raises ConfigError, one line, where target, environment, split or number of episodes do not fit.
    """
    target = find_target(arguments.target)
    overrides = ["steps=0", "name=eval", "tracking.wandb=disabled", "tracking.save_batches=false"]
    if arguments.split is not None:
        overrides.append(f"env.options.eval_split={arguments.split}")
    config = load_config(_recipe(arguments, target), [*overrides, *arguments.overrides])
    if arguments.split is not None and "eval_split" not in load_family(config.env.name).Options.model_fields:
        raise ConfigError(f"--split {arguments.split}: env {config.env.name!r} has no splits to choose from")

    source = str(getattr(validate_options(config), "source", None) or "")
    if arguments.split is not None and source and ("/" not in source or Path(source).exists()):
        raise ConfigError(
            f"--split {arguments.split}: env.options.source={source!r} has no splits, only held-out tasks"
        )

    available = make_family(config).task_count("eval")
    tasks = available if arguments.episodes is None else arguments.episodes
    if not 1 <= tasks <= available:
        raise ConfigError(f"--episodes {tasks}: env {config.env.name!r} has {available} held-out tasks here")

    folder = _started_from(target) if target.is_checkpoint else target.path
    changes = {
        "resume": Path(target.path) if target.is_checkpoint else None,
        "model": config.model if folder is None else ModelConfig(path=folder, dtype=config.model.dtype),
        "eval": config.eval.model_copy(update={"tasks": tasks, "every": 0}),
    }
    return config.model_copy(update=changes)


def find_target(text: str) -> Target:
    """A checkpoint folder, a run's folder (its newest checkpoint), a model folder or a hub name."""
    path = Path(text).absolute()
    if (path / "meta.json").exists():
        try:
            verify(path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        return Target(str(path), True, _run_of(path.parent.parent))

    if (path / "checkpoints").is_dir():
        checkpoint = latest(path / "checkpoints")
        if checkpoint is None:
            raise ConfigError(f"{text!r} is a run without a complete checkpoint")
        return replace(find_target(str(checkpoint)), run=_run_of(path))

    if path.exists() and not (path / "config.json").exists():
        raise ConfigError(f"{text!r} is neither a checkpoint (meta.json) nor a model folder (config.json)")
    return Target(str(path) if path.exists() else text, False, _run_of(path.parent))


def read_episodes(config: Config, run: Path) -> list[EpisodeResult]:
    """The results of the newest evaluation in a run's folder, by task."""
    lines = (run / "evals.jsonl").read_bytes().splitlines()
    results = [msgspec.json.decode(line, type=EpisodeResult) for line in lines]
    newest = max(result.version for result in results)
    results = [result for result in results if result.version == newest]

    family = make_family(config)
    for result in results:
        result.label = str(getattr(family.task("eval", result.task_index), "task_type", ALL))
    return results


def summarise(episodes: Sequence[EpisodeResult]) -> list[SuccessRow]:
    """One row per task type, in alphabetical order, then all of them together."""
    labels = sorted({episode.label for episode in episodes} - {ALL})
    by_label = [_row(label, [episode for episode in episodes if episode.label == label]) for label in labels]
    return [*by_label, _row(ALL, episodes)]


def print_table(rows: Sequence[SuccessRow], title: str) -> None:
    table = Table("tasks", "episodes", "success", "95 % interval", "turns", "tokens", title=title)
    for row in rows:
        interval = f"{row.low:.3f} - {row.high:.3f}"
        means = f"{row.turns:.1f}", f"{row.length:.1f}"
        table.add_row(row.label, str(row.episodes), f"{row.success:.3f}", interval, *means)

    CleanConsole(highlight=False).print(table)


def _row(label: str, episodes: Sequence[EpisodeResult]) -> SuccessRow:
    count = len(episodes)
    successes = sum(episode.success for episode in episodes)
    turns = sum(episode.turns for episode in episodes) / count
    length = sum(episode.length for episode in episodes) / count
    return SuccessRow(label, count, successes / count, *wilson(successes, count), turns, length)


def _recipe(arguments: argparse.Namespace, target: Target) -> Path:
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
        raise ConfigError(f"{arguments.target!r} comes from no run: name the environment with --env")

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

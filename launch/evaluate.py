"""`fresco eval`: success of a checkpoint or model on held-out tasks, through the very rollout path of training.

It is a run of 0 steps: the learner publishes the weights, generators load them, environment servers play the
episodes, the broker keeps each result (`<run>/evals.jsonl`). Greedy and sampled are two such runs, over the same tasks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from envs.registry import load_family, make_family
from launch.intervals import wilson
from rl.core.checkpoint_folder import CheckpointError, read_meta
from rl.core.config import Config, ConfigError, ModelConfig, load_config
from rl.core.run import RunFile

RECIPES = Path(__file__).parent.parent / "experiments"
ALL = "all"


@dataclass(frozen=True)
class Target:
    """What is evaluated: a checkpoint (then `step`) or a model, and the run that it came from, if any."""

    path: str
    checkpoint: bool
    run: Path | None


@dataclass(frozen=True)
class Episode:
    """One result; `label` is its task's type (`all` where the environment knows none)."""

    task_index: int
    label: str
    success: float
    reward: float
    turns: int
    length: int


@dataclass(frozen=True)
class Row:
    """One line of the table; `low` and `high` are Wilson's 95 % interval of the success rate."""

    label: str
    episodes: int
    success: float
    low: float
    high: float
    turns: float
    length: float


@dataclass(frozen=True)
class Request:
    """The arguments of `fresco eval`."""

    target: str
    env: str | None = None
    split: str | None = None
    temperatures: tuple[float, ...] = (0.0, 1.0)
    episodes: int | None = None
    recipe: Path | None = None
    overrides: tuple[str, ...] = ()
    out: Path | None = None


def evaluate(request: Request) -> int:
    """Run and print the tables. Returns the exit code; raises ConfigError."""
    config = configure(request)
    report: dict[str, Any] = {"target": request.target, "env": config.env.name, "split": request.split, "runs": []}
    for temperature in request.temperatures:
        folder, code = _run(config.model_copy(update={"eval": _eval(config, temperature)}))
        if code:
            return code
        episodes = read_episodes(config, folder)
        rows = summarise(episodes)
        print_table(rows, f"{request.target}, {request.split or 'held-out'} tasks, {_how(temperature)}")
        report["runs"].append(
            {"temperature": temperature, "rows": [asdict(row) for row in rows],
             "episodes": [asdict(episode) for episode in episodes]}
        )  # fmt: skip
    if request.out:
        request.out.parent.mkdir(parents=True, exist_ok=True)
        request.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def configure(request: Request) -> Config:
    """The evaluation's configuration: that of the target's own run, else of the environment's recipe.

    Raises ConfigError, one line, where target, environment, split or number of episodes do not fit.
    """
    target = find_target(request.target)
    recipe = _recipe(request, target)
    overrides = ["steps=0", "name=eval", "tracking.wandb=disabled", "tracking.save_batches=false"]
    if request.split is not None:
        overrides.append(f"env.options.eval_split={request.split}")
    config = load_config(recipe, [*overrides, *request.overrides])
    if request.split is not None and "eval_split" not in load_family(config.env.name).Options.model_fields:
        raise ConfigError(f"--split {request.split}: env {config.env.name!r} has no splits to choose from")
    folder = _started_from(target) if target.checkpoint else target.path
    resume = Path(target.path) if target.checkpoint else None
    model = config.model if folder is None else ModelConfig(path=folder, dtype=config.model.dtype)
    config = config.model_copy(update={"resume": resume, "model": model})
    available = make_family(config).task_count("eval")
    tasks = available if request.episodes is None else request.episodes
    if not 1 <= tasks <= available:
        raise ConfigError(f"--episodes {tasks}: env {config.env.name!r} has {available} held-out tasks here")
    return config.model_copy(update={"eval": config.eval.model_copy(update={"tasks": tasks, "every": 0})})


def find_target(text: str) -> Target:
    """A checkpoint folder, a run's folder (its newest checkpoint), a model folder or a hub name."""
    path = Path(text)
    if (path / "meta.json").exists():
        try:
            read_meta(path)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        return Target(str(path.absolute()), True, _run_of(path.absolute().parent.parent))
    if (path / "checkpoints").is_dir():
        complete = sorted(path.glob("checkpoints/step-*/meta.json"), key=lambda file: file.stat().st_mtime)
        if complete:
            return replace(find_target(str(complete[-1].parent)), run=_run_of(path.absolute()))
        raise ConfigError(f"{text!r} is a run without a complete checkpoint")
    if path.exists() and not (path / "config.json").exists():
        raise ConfigError(f"{text!r} is neither a checkpoint (meta.json) nor a model folder (config.json)")
    return Target(str(path.absolute()) if path.exists() else text, False, _run_of(path.absolute().parent))


def read_episodes(config: Config, run: Path) -> list[Episode]:
    """The results of the newest evaluation in a run's folder, by task."""
    rows = [msgspec.json.decode(line) for line in (run / "evals.jsonl").read_bytes().splitlines()]
    last = max(row["version"] for row in rows)
    family = make_family(config)
    return [
        Episode(
            row["task_index"],
            str(getattr(family.task("eval", row["task_index"]), "task_type", ALL)),
            row["success"],
            row["reward"],
            row["turns"],
            row["length"],
        )
        for row in rows
        if row["version"] == last
    ]


def summarise(episodes: Sequence[Episode]) -> list[Row]:
    """One row per task type, in alphabetical order, then all of them together."""
    labels = sorted({episode.label for episode in episodes} - {ALL})
    chosen = [(label, [episode for episode in episodes if episode.label == label]) for label in labels]
    return [_row(label, some) for label, some in [*chosen, (ALL, list(episodes))]]


def print_table(rows: Sequence[Row], title: str) -> None:
    table = Table("tasks", "episodes", "success", "95 % interval", "turns", "tokens", title=title)
    for row in rows:
        interval = f"{row.low:.3f} - {row.high:.3f}"
        table.add_row(
            row.label, str(row.episodes), f"{row.success:.3f}", interval, f"{row.turns:.1f}", f"{row.length:.1f}"
        )
    Console(highlight=False).print(table)


def _row(label: str, episodes: Sequence[Episode]) -> Row:
    count = len(episodes)
    successes = sum(episode.success for episode in episodes)
    low, high = wilson(successes, count)
    mean = [sum(values) / max(1, count) for values in ((e.turns for e in episodes), (e.length for e in episodes))]
    return Row(label, count, successes / max(1, count), low, high, *mean)


def _run(config: Config) -> tuple[Path, int]:
    from launch.plan import make_plan
    from launch.preflight import check, make_run, resolve_device
    from launch.recovery import execute

    device = resolve_device(config)
    plan = make_plan(config, device)
    prepared, train_tasks, eval_tasks, _ = check(config, device, dry=False)
    run = make_run(config, device, prepared, train_tasks, eval_tasks, time.time())
    return run.folder, execute(run, plan, prepared)


def _eval(config: Config, temperature: float) -> Any:
    return config.eval.model_copy(update={"temperature": temperature})


def _how(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _recipe(request: Request, target: Target) -> Path:
    """Named, or that of the run that the target came from, or `experiments/<env>_cpu.yaml`."""
    if request.recipe is not None:
        return request.recipe
    if target.run is not None:
        own = target.run / "config.yaml"
        if request.env is None or load_config(own).env.name == request.env:
            return own
    if request.env is None:
        raise ConfigError(f"{request.target!r} comes from no run: name the environment with --env")
    recipe = RECIPES / f"{request.env}_cpu.yaml"
    if not recipe.exists():
        known = ", ".join(sorted(path.name.removesuffix("_cpu.yaml") for path in RECIPES.glob("*_cpu.yaml")))
        raise ConfigError(f"--env {request.env!r} has no recipe of its own ({known} have): name one with --recipe")
    return recipe


def _run_of(folder: Path) -> Path | None:
    return folder if (folder / "config.yaml").exists() and (folder / "run.json").exists() else None


def _started_from(target: Target) -> str | None:
    """The model folder that the checkpoint's run began with: its tokenizer and shape are the checkpoint's."""
    if target.run is None:
        return None
    folder = RunFile.load(target.run).model_folder
    return str(folder) if folder is not None and folder.exists() else None

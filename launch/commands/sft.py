"""`fresco sft`: supervised fine-tuning on rows of conversations, with the learner of a run and nothing else.

It is a run of `learner.kind=supervised`: the same folder, checkpoints, metrics, report and end as any, and `model/` in
it is for transformers, vLLM and `model.path`. Rows become token ids before anything starts.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from envs.chat import NAME, Imitated
from envs.registry import make_family
from launch.commands.run import execute
from launch.cpu.fork_server import begin_as_copies
from launch.dry_run import print_plan
from launch.preflight import Preflight, check, make_run
from launch.provenance import write_provenance
from launch.refusing import Refusing
from launch.sittings import with_checkpoint
from launch.terminal import say
from launch.warm_start.writing import Written, written
from rl.config.schema import Config, ConfigError, load_config
from rl.learner.rows import FOLDER, IMITATED
from rl.store.made_once import waited_s
from rl.store.token_rows import Marked, write_token_rows
from rollout.episodes.environment import EnvironmentFamily
from rollout.episodes.tokenizer import ChatTokenizer, TokenizerError

_ALWAYS = ("learner.kind=supervised", f"env.name={NAME}", "algo.loss=reinforce", f"algo.advantage={IMITATED}")
_USUAL = ("name=sft", "rollout.group_size=1", "learner.lr=1e-5", "learner.schedule=cosine", "learner.warmup_steps=10")
_NOT_USED = ("weights.probe=false", "tracking.samples=0", "sampling.max_tokens=1", "sampling.temperature=1")
_UNTRAINED = "generator.max_model_len"
_MOST_STEPS = 10**9  # as `steps` itself


def sft(arguments: argparse.Namespace) -> int:
    """Returns the exit code of the run, 0 after a dry run. Raises ConfigError."""
    started = time.time()
    config = _configuration(arguments)
    family = make_family(config)
    config = _with_totals(config, family, arguments.epochs)
    recipe = arguments.recipe or Path(arguments.data)
    if arguments.dry_run:
        print_plan(check(config, dry=True), recipe, verbose=arguments.verbose)
        return 0

    config = with_checkpoint(config)
    print(f"{arguments.data}: {family.task_count('train')} rows, {config.steps} steps", flush=True)
    with begin_as_copies(config) as begin:
        checked = check(config, dry=False, begin=begin)
        rows = {split: _token_rows(checked, family, split) for split in ("train", "eval")}
        run = make_run(checked, started + waited_s())
        for split, marked in rows.items():
            write_token_rows(run.folder / FOLDER / split, marked)
        write_provenance(run.folder, recipe, config, run)
        print(f"configuration: {run.folder / 'config.yaml'}", flush=True)
        return execute(run, checked, begin)


def _configuration(arguments: argparse.Namespace) -> Config:
    """What the command says, over a recipe or what is usual."""
    named = {"env.options.source": arguments.data}
    if (held_out := arguments.held_out) is not None:
        named["env.options.eval_count" if _is_number(held_out) else "env.options.eval_source"] = held_out
    if arguments.batch is not None:
        named["rollout.groups_per_batch"] = str(arguments.batch)

    told = [f"{field}={_as_yaml(value)}" for field, value in named.items()]
    usual = [] if arguments.recipe else _USUAL
    config = load_config(arguments.recipe, [*usual, *_NOT_USED, *_ALWAYS, *told, *arguments.overrides])
    for field, why in (("seconds", "set steps or --epochs"), ("resume_data", "begin anew from the model")):
        if getattr(config, field) != getattr(Config(), field):
            raise ConfigError(f"{field}={getattr(config, field)}: fresco sft does not know it; {why}")
    if (temperature := config.sampling.temperature) != 1:
        raise ConfigError(f"sampling.temperature={temperature:g}: rows are learned at temperature 1; leave it out")
    return config


def _is_number(value: str) -> bool:
    return value.removeprefix("-").isdecimal()


def _as_yaml(value: str) -> str:
    return value if _is_number(value) else yaml.safe_dump(value, default_flow_style=True, width=10**6).split("\n")[0]


def _with_totals(config: Config, family: EnvironmentFamily, epochs: float | None) -> Config:
    """With as many steps as the epochs have, and all held-out rows, unless the configuration says how many."""
    named = config.model_fields_set
    rows, batch = family.task_count("train"), config.rollout.groups_per_batch
    if rows < batch:
        raise ConfigError(f"--batch={batch}: there are only {rows} rows to train; give --batch {rows}, or more rows")
    steps = (1 if epochs is None else epochs) * rows / batch
    if epochs is not None and ("steps" in named or not 0 < steps <= _MOST_STEPS):
        wrong = f"; it must be above 0, and make at most {_MOST_STEPS} steps"
        both = f" beside steps={config.steps}; give one of them"
        raise ConfigError(f"--epochs={epochs:g}{both if 'steps' in named else wrong}")

    changed: dict[str, Any] = {} if "steps" in named else {"steps": math.ceil(steps)}
    if "tasks" not in config.eval.model_fields_set:
        changed["eval"] = config.eval.model_copy(update={"tasks": family.task_count("eval")})
    return config.model_copy(update=changed)


def _token_rows(checked: Preflight, family: EnvironmentFamily, split: str) -> list[list[Marked]]:
    """The rows as ids, and which of them are learned. Raises ConfigError."""
    config = checked.config
    limit = config.generator.max_model_len
    assert checked.prepared.folder is not None
    with Refusing(f"model.path={config.model.path!r}", TokenizerError):
        tokenizer = ChatTokenizer(checked.prepared.folder, config.chat.template_options)

    count = family.task_count(split)
    found = [_marked(tokenizer, family.task(split, index), config) for index in range(count)]
    kept = [each for each in found if each is not None]
    if count and not kept:
        raise ConfigError(f"{_UNTRAINED}={limit}: no row is that short; raise it, or give shorter rows")
    if long := count - len(kept):
        which = "training" if split == "train" else "held-out"
        passes = config.steps * config.rollout.groups_per_batch / len(kept)
        of_others = f"; {config.steps} steps are {passes:.2g} passes over the others" if split == "train" else ""
        say(f"! {long} of {count} {which} rows are longer than {_UNTRAINED}={limit} and left out{of_others}")
    return kept


def _marked(tokenizer: ChatTokenizer, row: Imitated, config: Config) -> list[Marked] | None:
    """The row's sequences; None if one is too long. Raises ConfigError, which names the row."""
    places = [i for i, each in enumerate(row.messages) if each.role == "assistant" and i >= row.first]
    ends = [*places[1:], len(row.messages)]
    turns = [(row.messages[i], row.messages[i + 1 : end]) for i, end in zip(places, ends, strict=True)]
    opening = row.messages[: places[0]]

    with Refusing(row.where, TokenizerError):
        sequences = written(tokenizer, opening, turns, config.generator.max_model_len, config.chat.thinking)
    return None if sequences is None else [_as_marked(each) for each in sequences]


def _as_marked(sequence: Written) -> Marked:
    """Its ids, and 1 at each that the model is to write."""
    mask = np.zeros(len(sequence.ids), np.uint8)
    for start, end, _ in sequence.turns:
        mask[start:end] = 1
    return np.array(sequence.ids, np.int32), mask

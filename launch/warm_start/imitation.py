"""Warm start: supervised training of any model on an environment's demonstrations, as one cached step before RL.

`warm_started(config, base)` returns a folder that transformers and vLLM load like any other. It is made once and kept
under the hash of everything it depends on. That is the section `model.warm_start`, the environment and its options, the
model it begins with, and the sources that make it. Demonstrations become ids as `writing.py` says.

With `model.path=tiny` the model is new: the shape of `tiny.py`, and a tokenizer made of the demonstrations.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch

import launch.warm_start.sft
import launch.warm_start.writing
from envs.registry import demonstrator, own_family
from launch.warm_start.sft import IMITATED, READ, SHOWN, Example, SupervisedOptions, progress_report, train_supervised
from launch.warm_start.tiny import TinyRecipe, new_model
from launch.warm_start.word_tokenizer import PIECE, SOURCES, build_tokenizer, save_tokenizer
from launch.warm_start.writing import written
from rl.config.schema import Config, ConfigError
from rl.store.made_once import cache_folder, digest, made_once, to_stderr
from rollout.episodes.environment import ChatMessage, Demonstration
from rollout.episodes.tokenizer import ChatTokenizer

_WARMUP_STEPS = 20
_PARTS = 2  # of a batch on the CPU, a core each
_SOURCES = (launch.warm_start.sft.__file__, launch.warm_start.writing.__file__, *SOURCES, __file__)


def warm_started(
    config: Config, base: Path | None, cache: Path | None = None, log: Callable[[str], None] = to_stderr
) -> Path:
    """The folder of the warm-started model, made first if it is not there. `base` None: a new tiny model.

    Raises ConfigError if the environment has no demonstrator, or one that solves nothing within the limits, or makes no
    slips where they are asked for.
    """
    folder = (cache or cache_folder()) / f"warm-{fingerprint(config, base)}"
    return made_once(folder, lambda draft: _make(config, base, draft, log))


def fingerprint(config: Config, base: Path | None) -> str:
    """16 hex digits that change with whatever the result depends on."""
    parts = {
        "warm_start": config.model.warm_start.model_dump(mode="json"),
        "tiny": config.model.tiny if base is None else None,
        "base": _files(base) if base is not None else None,
        "env": [config.env.name, config.env.options, config.env.max_turns, config.seed],
        "max_model_len": config.generator.max_model_len,
    }
    own = inspect.getfile(demonstrator(config.env.name))
    return digest(json.dumps(parts, sort_keys=True, default=str), *_SOURCES, own)


def demonstrations(config: Config) -> list[Demonstration]:
    """What the environment's demonstrator does in training tasks. Raises ConfigError."""
    options = config.model.warm_start
    demonstrate = demonstrator(config.env.name)
    family = own_family(config)
    habits = {"mistakes": options.mistakes, "max_turns": config.env.max_turns}
    if options.slips:
        if "slips" not in inspect.signature(demonstrate).parameters:
            refused = f"model.warm_start.slips={options.slips:g}"
            raise ConfigError(f"{refused}: the demonstrator of env {config.env.name!r} makes none; leave it out")
        habits["slips"] = options.slips

    async def collect() -> list[Demonstration]:
        try:
            await family.start()
            played: list[Demonstration] = await demonstrate(family, options.demonstrations, seed=options.seed, **habits)
            return played
        finally:
            await family.stop()

    played = asyncio.run(collect())
    if not played:
        nothing = f"the demonstrator of env {config.env.name!r} solved no task"
        raise ConfigError(f"model.warm_start: {nothing} within env.max_turns={config.env.max_turns}")
    return played


def encode(tokenizer: ChatTokenizer, played: Demonstration, max_length: int) -> Example | None:
    """An episode as the ids of a conversation, each marked as what it is; None if longer than `max_length`."""
    turns = [(ChatMessage("assistant", turn.action), turn.answer) for turn in played.turns]
    sequences = written(tokenizer, played.opening, turns, max_length)
    if sequences is None:
        return None

    (whole,) = sequences
    prompt = whole.turns[0][0]
    mask = np.full(len(whole.ids), READ, np.uint8)
    for start, end, number in whole.turns:
        mask[start:end] = IMITATED if played.turns[number].imitate else SHOWN
    return Example(whole.ids[:prompt], whole.ids[prompt:], mask[prompt:].tolist())


def _make(config: Config, base: Path | None, folder: Path, log: Callable[[str], None]) -> None:
    from transformers.utils.logging import disable_progress_bar

    from rl.models.stock import load_stock

    disable_progress_bar()
    started = time.monotonic()
    played = demonstrations(config)
    log(f"warm start: {len(played)} demonstrations of {config.env.name} in {time.monotonic() - started:.0f} s")
    if base is None:
        _new_tiny_model(config, played, folder)
    else:
        shutil.copytree(base, folder)

    tokenizer = ChatTokenizer(folder)
    longest = config.generator.max_model_len
    examples = [example for each in played if (example := encode(tokenizer, each, longest)) is not None]
    if not examples:
        raise ConfigError(f"generator.max_model_len={longest}: no demonstration is that short")

    device = "cuda" if base is not None and torch.cuda.is_available() else "cpu"
    packs = device == "cpu"
    model = load_stock(folder, packed=packs).to(device)

    settings = config.model.warm_start
    options = SupervisedOptions(
        settings.steps,
        settings.lr,
        _WARMUP_STEPS,
        width=None if packs else max(256, min(1024, max(map(len, examples)))),
        read_weight=settings.read_weight,
        parts=_PARTS if device == "cpu" else 1,
    )

    stream = _without_end(examples, settings.seed)
    train_supervised(
        model,
        lambda step: list(islice(stream, settings.batch)),
        options,
        progress_report(log, settings.steps, every=50),
    )
    model.save_pretrained(folder)


def _new_tiny_model(config: Config, played: Sequence[Demonstration], folder: Path) -> None:
    recipe = TinyRecipe.model_validate({"seed": config.model.warm_start.seed} | config.model.tiny)
    recipe = recipe.model_copy(update={"max_length": max(recipe.max_length, config.generator.max_model_len)})
    piece = getattr(inspect.getmodule(demonstrator(config.env.name)), "PIECE", PIECE)
    tokenizer = build_tokenizer(_texts(played), piece)

    folder.mkdir()
    save_tokenizer(tokenizer, folder, recipe.max_length)
    new_model(recipe, tokenizer).save_pretrained(folder)


def _texts(played: Sequence[Demonstration]) -> Iterator[str]:
    for episode in played:
        yield from (message.content for message in episode.opening)
        for turn in episode.turns:
            yield f"\n{turn.action}"
            yield turn.action
            yield from (message.content for message in turn.answer)


def _without_end(examples: Sequence[Example], seed: int) -> Iterator[Example]:
    """The examples again and again, every pass in a new order."""
    rng = random.Random(seed)
    while True:
        yield from rng.sample(examples, len(examples))


def _files(folder: Path) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a model's files: its content is too large to hash."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

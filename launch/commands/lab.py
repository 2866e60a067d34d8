"""`fresco lab RUN --losses grpo,topr,my_module:mine`: the run's own batches under several losses.

At the first step all of them see the same batch from the same weights: what is told of it is exact. Later steps are
counterfactuals, with their trust. What comes out stands in `<run>/lab.json`, which the report shows.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from launch.commands.replay import Trust, read
from launch.report.gather import LAB
from launch.terminal import CleanConsole
from rl.config.schema import ConfigError
from rl.replay.lab import FirstStep
from rl.replay.recorded import Recorded
from rl.replay.replay import RECORDED, Request, Row
from rollout.episodes.pieces import Pieces
from rollout.episodes.tokenizer import TokenizerError, load_tokenizer

_CURVES = ("train/grad_norm", "loss/entropy", "loss/kl_behavior", "loss/ess", "trust/ess", "trust/kl", "gain")
_SHOWN = 12  # samples


def lab(arguments: argparse.Namespace) -> int:
    """Returns 0. Raises ConfigError."""
    recorded = Recorded(arguments.run)
    first, last = recorded.span(arguments.first, arguments.last)
    wanted = {name: [f"algo.loss={name}"] for name in map(str.strip, arguments.losses.split(",")) if name}
    wanted |= {text: text.split() for text in arguments.variants if text.split()}
    if not wanted:
        raise ConfigError('give --losses grpo,topr,my_module:mine, or --with "algo.advantage=batch", or both')
    variants = {name: recorded.changed(items) for name, items in wanted.items()}

    trust = Trust(arguments.trust)
    found: defaultdict[str, list[Row]] = defaultdict(list)
    beyond: dict[str, int] = {}
    for row in read(recorded, Request(first, last, variants)):
        if row.n > first:
            found[row.variant].append(row)
        if trust.ends(row):
            beyond.setdefault(row.variant, row.n)

    firsts = {name: rows[0].first for name, rows in found.items() if rows[0].first is not None}
    told = {
        "first": first,
        "trust": [trust.ess, trust.kl],
        "reproduced": all(row.identical for row in found[RECORDED]),
        "losses": [_loss(name, found[name], pulled, beyond.get(name)) for name, pulled in firsts.items()],
        "samples": _samples(recorded, first, firsts),
    }
    (arguments.run / LAB).write_bytes(msgspec.json.encode(told))
    _print(told, arguments.run)
    return 0


def _loss(name: str, rows: list[Row], first: FirstStep, beyond: int | None) -> dict[str, Any]:
    """What one loss did: at the first step, then as curves. `beyond`: the version from which on it is not trusted."""
    values = rows[0].values
    return {
        "name": name,
        "gradient": values["train/grad_norm"],
        "cosine": first.cosine,
        "stopped": max((values[key] for key in values if fnmatch(key, "loss/*_fraction")), default=0.0),
        "ess": values.get("loss/ess"),
        "by_age": first.by_age,
        "by_reward": first.by_reward,
        "steps": [row.n for row in rows],
        "curves": {key: [row.values.get(key) for row in rows] for key in _CURVES if key in rows[-1].values},
        "gain": _total(rows if beyond is None else [row for row in rows if row.n < beyond]),
        "beyond": beyond,
        "cpu_s": sum(row.cpu_s for row in rows),
    }


def _total(rows: list[Row]) -> tuple[float, float] | None:
    """The mean gain of the steps that are trusted, and its standard error."""
    gains = [(row.values["gain"], row.values["gain/error"]) for row in rows if "gain" in row.values]
    if not gains:
        return None
    return sum(gain for gain, _ in gains) / len(gains), math.hypot(*(error for _, error in gains)) / len(gains)


def _samples(recorded: Recorded, step: int, firsts: dict[str, FirstStep]) -> list[dict[str, Any]]:
    """Those whose share of the update the losses see most differently, with what was said, and the pull of each token
    that was generated."""
    members = sorted(set().union(*(first.samples for first in firsts.values())))
    shares = {member: {name: first.samples.get(member, 0.0) for name, first in firsts.items()} for member in members}

    batch = recorded.part(step, 0, 1)
    try:
        pieces = Pieces(load_tokenizer(recorded.run.model_folder))
    except (OSError, TokenizerError):  # the model is gone: numbers stand for its words
        pieces = Pieces(load_tokenizer(None))

    told = []
    for member in sorted(members, key=lambda each: min(shares[each].values()) - max(shares[each].values()))[:_SHOWN]:
        row = batch.rows[member]
        own = batch.of_rows([member])
        facts = {"group": row.group_id, "reward": row.reward, "age": step - row.version, "share": shares[member]}
        pull = {name: first.tokens.get(member, []) for name, first in firsts.items()}
        generated = own.loss_mask.nonzero()[0].tolist()
        told.append(facts | {"text": pieces.of(own.token_ids.tolist()), "generated": generated, "pull": pull})
    return told


def _print(told: dict[str, Any], run: Path) -> None:
    losses = told["losses"]
    print(f"batch {told['first']}, exact; then {len(losses[0]['steps'])} steps with their trust")
    heads = ("loss", "gradient", "cosine", "stopped", "ess", "trust ess", "trust kl", "gain", "beyond trust", "CPU s")
    table = Table(*heads, box=None, pad_edge=False)
    for each in losses:
        near = [each["curves"].get(key, [None])[-1] for key in ("trust/ess", "trust/kl")]
        numbers = [each["gradient"], each["cosine"][RECORDED], each["stopped"], each["ess"], *near]
        cells = ["" if number is None else f"{number:.4g}" for number in numbers]
        gain = f"{each['gain'][0]:+.4f} ± {each['gain'][1]:.4f}" if each["gain"] else ""
        beyond = f"from version {each['beyond']}" if each["beyond"] else ""
        table.add_row(each["name"], *cells, gain, beyond, f"{each['cpu_s']:.1f}")

    CleanConsole(highlight=False, width=160).print(table)
    if not told["reproduced"]:
        print("the run itself did not come out identical here: see fresco replay")
    print(f"pulls by age and reward, cosines of each pair, curves, samples: fresco report {run}, the page Lab")

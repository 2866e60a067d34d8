"""`fresco lab RUN --losses grpo,topr,my_module:mine`: the run's own batches under several losses.

At the first step all of them see the same batch from the same weights: what is told of it is exact. Later steps are
counterfactuals, with their trust. What comes out stands in `<run>/lab.json`, which the report shows.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from rich.table import Table

from launch.commands.replay import trust_of
from launch.report.gather import LAB
from launch.report.samples import known_pieces
from launch.terminal import CleanConsole
from rl.config.schema import ConfigError
from rl.replay.lab import FirstStep
from rl.replay.recorded import Recorded
from rl.replay.replay import RECORDED, Request, Row, replayed

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

    trust = trust_of(arguments.trust)
    found: defaultdict[str, list[Row]] = defaultdict(list)
    for row in replayed(recorded, Request(first, last, variants, trust=trust)):
        if row.n > first:
            found[row.variant].append(row)

    firsts = {name: rows[0].first for name, rows in found.items() if rows[0].first is not None}
    told = {
        "first": first,
        "trust": trust,
        "reproduced": all(row.identical for row in found[RECORDED]),
        "losses": [_loss(name, found[name], pulled) for name, pulled in firsts.items()],
        "samples": _samples(recorded, first, firsts),
    }
    (arguments.run / LAB).write_bytes(msgspec.json.encode(told))
    _print(told, arguments.run)
    return 0


def _loss(name: str, rows: list[Row], first: FirstStep) -> dict[str, Any]:
    """What one loss did: at the first step, then as curves. `beyond`: the version from which on it is not trusted."""
    values = rows[0].values
    stopped = [value for key, value in values.items() if key.startswith("loss/") and key.endswith("_fraction")]
    trusted = [row.values for row in rows if "gain" in row.values and not row.beyond]
    return {
        "name": name,
        "gradient": values["train/grad_norm"],
        "cosine": first.cosine,
        "stopped": max(stopped, default=0.0),
        "ess": values.get("loss/ess"),
        "by_age": first.by_age,
        "by_reward": first.by_reward,
        "steps": [row.n for row in rows],
        "curves": {key: [row.values.get(key) for row in rows] for key in _CURVES if key in rows[-1].values},
        "gain": _total(trusted) if trusted else None,
        "beyond": next((row.n for row in rows if row.beyond), None),
        "cpu_s": sum(row.cpu_s for row in rows),
    }


def _total(trusted: list[dict[str, float]]) -> tuple[float, float]:
    """The mean gain of these steps, and its standard error."""
    gain = fmean(values["gain"] for values in trusted)
    return gain, math.hypot(*(values["gain/error"] for values in trusted)) / len(trusted)


def _samples(recorded: Recorded, step: int, firsts: dict[str, FirstStep]) -> list[dict[str, Any]]:
    """Those whose share of the update the losses see most differently, with what was said, and the pull of each token
    that was generated."""
    batch = recorded.part(step, 0, 1)
    pieces = known_pieces(recorded.run)
    shares = {member: {name: each.samples[member] for name, each in firsts.items()} for member in batch.members}

    told = []
    for member in sorted(shares, key=lambda each: min(shares[each].values()) - max(shares[each].values()))[:_SHOWN]:
        row = batch.rows[member]
        own = batch.of_rows([member])
        facts = {"group": row.group_id, "reward": row.reward, "age": step - row.version, "share": shares[member]}
        generated = own.loss_mask.nonzero()[0].tolist()
        pull = {name: each.tokens[member] for name, each in firsts.items()}
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

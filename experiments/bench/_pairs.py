"""Pairs of runs that a comparison keeps, so that one of hours can be made in several sittings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from experiments.bench._outcome import RunResult
from experiments.compare.job import read_lines


@dataclass(frozen=True)
class Pair:
    """One seed, trained by both sides."""

    seed: int
    settings: Mapping[str, str]
    """What all pairs of a comparison have in common."""
    others: float
    """Share of the machine's cores that others used meanwhile."""
    runs: Mapping[str, RunResult]
    """The runs by the trainer's name."""


def pairs_of(count: int, make: Callable[[int], Pair], settings: Mapping[str, str], path: Path | None) -> list[Pair]:
    """The pairs of the seeds from 0 on, by `make` where the file has none yet.

    Each is appended to the file, one JSON line, as soon as it has been made; without a path nothing is kept. Raises
    SystemExit, before anything is made, if the file's pairs were made with other settings.
    """
    kept = {pair.seed: pair for pair in _read(path, settings)} if path is not None else {}
    found = []

    for seed in range(count):
        pair = kept.get(seed) or make(seed)
        found.append(pair)
        if path is not None and seed not in kept:
            with path.open("ab") as file:
                file.write(msgspec.json.encode(pair) + b"\n")

    return found


def _read(path: Path, settings: Mapping[str, str]) -> list[Pair]:
    pairs = [msgspec.convert(line, Pair) for line in read_lines(path)]
    for pair in pairs:
        for name, value in settings.items():
            if pair.settings.get(name) != value:
                raise SystemExit(
                    f"--keep {path}: seed {pair.seed} was made with {name} {pair.settings.get(name)}, this call has "
                    f"{value}; name another file"
                )
    return pairs

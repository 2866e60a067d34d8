"""Conversations for the page: an index of episodes, their tokens as arrays, and the text of every token that occurs."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from launch.report.blocks import Arrays
from launch.report.tasks import types_of
from rl.store.samples import Sample, SampleFiles, Trained, read_trained
from rl.wire.run import RunFile
from rollout.episodes.pieces import Pieces
from rollout.episodes.tokenizer import TokenizerError, load_tokenizer

MOST_TOKENS = 1_500_000
_UNKNOWN = -32768
_MILLI = 1000  # nats are stored in thousandths
_AS_ARRAYS = ("token_ids", "logp", "versions")


@dataclass
class SamplePage:
    facts: dict[str, Any]
    arrays: Arrays


def known_pieces(run: RunFile) -> Pieces:
    """The texts of a run's tokens; their numbers, where the model is no longer there."""
    try:
        return Pieces(load_tokenizer(run.model_folder))
    except (OSError, TokenizerError):
        return Pieces(load_tokenizer(None))


def gather_samples(folder: Path, run: RunFile) -> SamplePage:
    """The samples to show: of the episodes that were kept as many as fit, in whole groups, evenly spread over the
    run. Every sample is read once to choose, and those that are shown again: memory holds no other's tokens."""
    files = SampleFiles(folder)
    numbers, kept = chosen(files.read(range(len(files))), MOST_TOKENS)
    shown = [sample for _, sample in files.read(numbers)]
    trained = read_trained(folder, {sample.ticket_id for sample in shown})

    ids = np.array([id for sample in shown for id in sample.token_ids], np.uint32)
    vocabulary, places = np.unique(ids, return_inverse=True)
    pieces = known_pieces(run)
    facts = {
        "kept": kept,
        "episodes": [_episode(sample, trained.get(sample.ticket_id), pieces) for sample in shown],
        "texts": [pieces.text(id) for id in vocabulary.tolist()],
    }

    arrays = {
        "place": places.astype(np.uint32),  # in the texts
        "vocabulary": np.diff(vocabulary, prepend=np.uint32(0)),  # their ids, each by its distance to the one before
        "logp": _thousandths([value for sample in shown for value in sample.logp]),
        "version": np.array([version for sample in shown for version in sample.versions], np.int32),
    }
    for name, kind in (("ratio", "log_ratio"), ("entropy", "entropy"), ("advantage", "advantage")):
        columns = [_spread(sample, trained.get(sample.ticket_id), kind) for sample in shown]
        known = np.concatenate(columns) if columns else np.zeros(0)
        arrays[name] = known.astype(np.float32) if name == "advantage" else _thousandths(known)
    return SamplePage(facts, arrays)


def chosen(samples: Iterable[tuple[int, Sample]], most_tokens: int) -> tuple[list[int], int]:
    """The numbers of those to show, and of how many: whole groups (of an evaluation, all of a task), every n-th where
    not all fit. One that does not fit by itself is left out, unless none does."""
    places: dict[tuple[str, int, int], int] = {}  # of a group among the groups
    sizes = array("q")
    numbers = array("q")
    group_of = array("q")

    for number, sample in samples:
        by_task = (sample.task_index, max(sample.versions, default=-1))
        group = (sample.kind, *(by_task if sample.kind == "eval" else (sample.group_id, 0)))
        place = places.setdefault(group, len(places))
        if place == len(sizes):
            sizes.append(0)

        sizes[place] += len(sample.token_ids)
        numbers.append(number)
        group_of.append(place)

    fitting = [place for place, size in enumerate(sizes) if size <= most_tokens] or [*range(len(sizes))][:1]
    stride = 1
    while sum(sizes[place] for place in fitting[::stride]) > most_tokens and stride < len(fitting):
        stride += 1

    shown = set(fitting[::stride])
    return [number for number, place in zip(numbers, group_of, strict=True) if place in shown], len(numbers)


def _episode(sample: Sample, trained: Trained | None, pieces: Pieces) -> dict[str, Any]:
    versions = [version for version in sample.versions if version >= 0]
    counted = trained is not None and len(trained.advantage) == len(versions)
    played = {name: value for name, value in msgspec.structs.asdict(sample).items() if name not in _AS_ARRAYS}

    return played | {
        "tokens": len(sample.token_ids),
        "generated": len(versions),
        "oldest": min(versions, default=-1),
        "newest": max(versions, default=-1),
        "types": types_of(sample.info),
        "pieces": dict(pieces.joined(sample.token_ids)),
        "step": trained.step if trained else None,
        "clipped": trained.clipped if trained and counted else [],
    }


def _spread(sample: Sample, trained: Trained | None, name: str) -> np.ndarray:
    """(T,) of what the learner knows of a sample's generated tokens; nan elsewhere."""
    found = np.full(len(sample.token_ids), np.nan)
    generated = np.flatnonzero(np.asarray(sample.versions) >= 0)
    values: list[float] = getattr(trained, name, [])
    if len(values) == len(generated):
        found[generated] = values
    return found


def _thousandths(values: Sequence[float] | np.ndarray) -> np.ndarray:
    scaled = np.asarray(values, np.float64) * _MILLI
    bounded = np.clip(np.nan_to_num(scaled, nan=_UNKNOWN), _UNKNOWN, -_UNKNOWN - 1)
    return bounded.round().astype(np.int16)

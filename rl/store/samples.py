"""Episodes as they were played, for people to read: one append-only file for each environment server.

What the learner knows of their tokens (`Trained`) stands in files of its own, one for each rank, below `trained/`.

A line is one `Sample` as JSON, written by one call: a killed process loses the line that it was writing, no more, and
readers skip it. Groups are kept whole, so that the members of a group can be compared.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from rl.config.damage import read_lines
from rl.wire.messages import Trajectory

FOLDER = "samples"
TRAINED = "trained"
_SHOWN = ("token_ids", "logp_behavior", "policy_version")
_MOST_IDS = 1 << 31
_KNUTH = 2654435761  # spreads consecutive numbers evenly over 32 bits
S = TypeVar("S", bound=msgspec.Struct)


class SampleTurn(msgspec.Struct, array_like=True):
    """Positions index the tokens of the sample, whose sequences follow one another; `end` is one past the last one."""

    start: int
    end: int
    reward: float
    finish_reason: str
    generator: int


class Sample(msgspec.Struct):
    """Per-token lists have one entry for each of the T tokens; prompts and observations have version -1."""

    time: float
    """The time of its end, in seconds of Unix time."""
    kind: str
    """`train` or `eval`."""
    ticket_id: int
    group_id: int
    task_index: int
    reward: float
    success: bool
    stop_reason: str
    seconds: float
    token_ids: list[int]
    logp: list[float]
    """The log-probabilities of what was generated, under the policy that sampled it; 0 elsewhere."""
    versions: list[int]
    turns: list[SampleTurn]
    starts: list[int] = msgspec.field(default_factory=lambda: [0])
    """Where each sequence begins: several, if the history of the episode forked."""
    info: dict[str, float] = {}
    unrewarded: str = ""
    """Why its reward is not known, if so: it is not trained."""
    notes: dict[str, str] = {}
    """What the environment says to people, such as the gold answer: `Step.notes`."""

    @property
    def is_whole(self) -> bool:
        """Whether its lists fit together: a damaged file may hold a line that is JSON, and no episode."""
        tokens = len(self.token_ids)
        places = [0, *(place for turn in self.turns for place in (turn.start, turn.end)), tokens]
        return (
            tokens == len(self.logp) == len(self.versions)
            and all(0 <= token < _MOST_IDS for token in self.token_ids)
            and places == sorted(places)
            and all(0 <= start <= tokens for start in self.starts)
        )


class Trained(msgspec.Struct):
    """A sample in the batch that trained it. Per-token lists are of its L loss tokens, in order."""

    ticket_id: int
    step: int
    """The version that was trained."""
    advantage: list[float]
    log_ratio: list[float]
    """Current policy against the one that sampled, in nats."""
    entropy: list[float]
    """The entropy of the current policy, in nats."""
    clipped: list[int]
    """Places among the L where a bound of the loss or of the correction took effect."""


class LineFile:
    """Appends structs to a file. A full disk ends the writing, never the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, line: msgspec.Struct) -> None:
        if self._file < 0:
            return
        try:
            os.write(self._file, msgspec.json.encode(line) + b"\n")
        except OSError as error:
            print(f"{self._path} is no longer written: {error}", file=sys.stderr, flush=True)
            self.close()

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


class SampleFile(LineFile):
    """What one environment server played."""

    def __init__(self, run: Path, name: str, rate: float) -> None:
        """rate: the share of training groups that are kept; evaluations are kept in full."""
        super().__init__(run / FOLDER / f"{name}.jsonl")
        self._rate = rate

    def add(self, trajectory: Trajectory, notes: Mapping[str, str] | None = None) -> None:
        """Keep it, if it is one of those that are kept."""
        if trajectory.kind == "eval" or is_kept(trajectory.group_id, self._rate):
            self.write(sample_of(trajectory, notes))


def is_kept(group_id: int, rate: float) -> bool:
    """The same groups on every server and every rank."""
    return (group_id * _KNUTH) % (1 << 32) < rate * (1 << 32)


def sample_of(trajectory: Trajectory, notes: Mapping[str, str] | None = None) -> Sample:
    sequences = trajectory.sequences
    lengths = [len(sequence.token_ids) for sequence in sequences]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    turns = [
        SampleTurn(start + t.start, start + t.end, t.reward, t.finish_reason, t.generator)
        for start, sequence in zip(starts, sequences, strict=True)
        for t in sequence.turns
    ]

    joined = {name: np.concatenate([each.columns[name] for each in sequences]).tolist() for name in _SHOWN}
    played = {
        name: getattr(trajectory, name) for name in Sample.__struct_fields__ if name in trajectory.__struct_fields__
    }

    return Sample(
        **played,
        time=time.time(),
        token_ids=joined["token_ids"],
        logp=[round(value, 4) for value in joined["logp_behavior"]],
        versions=joined["policy_version"],
        turns=turns,
        starts=starts,
        notes=dict(notes or {}),
    )


def read_samples(run: Path) -> Iterator[Sample]:
    """The samples of every server, in the order in which they ended, also of a run that was killed or goes on."""
    found = (sample for sample in _lines(run / FOLDER, Sample) if sample.is_whole)
    yield from sorted(found, key=lambda sample: sample.time)


def read_trained(run: Path) -> dict[int, Trained]:
    """What was trained, by ticket; of one that was trained again after the learner's death, the last time."""
    found = _lines(run / FOLDER / TRAINED, Trained)
    return {trained.ticket_id: trained for trained in sorted(found, key=lambda trained: trained.step)}


def _lines(folder: Path, kind: type[S]) -> Iterator[S]:
    """Every line of the folder's files that can be read."""
    for path in sorted(folder.glob("*.jsonl")):
        yield from read_lines(path, kind)

"""Episodes as they were played, for people to read: one append-only file for each environment server.

What the learner knows of their tokens (`Trained`) stands in files of its own, one for each rank, below `trained/`.

A line is one `Sample` as JSON, written by one call: a killed process loses the line that it was writing, no more, and
readers skip it. Groups are kept whole, so that the members of a group can be compared.
"""

from __future__ import annotations

import os
import sys
import time
from array import array
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np

from rl.config.damage import lines_at, placed_lines, read_lines
from rl.wire.messages import Trajectory

FOLDER = "samples"
TRAINED = "trained"
_SHOWN = ("token_ids", "logp_behavior", "policy_version")
_MOST_IDS = 1 << 31
_KNUTH = 2654435761  # spreads consecutive numbers evenly over 32 bits


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
            and 0 <= min(self.token_ids, default=0) <= max(self.token_ids, default=0) < _MOST_IDS
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


class _Ended(msgspec.Struct):
    time: float


class SampleFiles:
    """The samples of every server, numbered in the order in which they ended, also of a run that was killed or goes on.

    Memory holds where each of them stands (28 bytes), and the one that is being read: a long run keeps more tokens
    than any memory has room for.
    """

    def __init__(self, run: Path) -> None:
        self._paths = _files(run / FOLDER)
        self._path = array("I")
        self._place = array("q")
        times = array("d")
        for number, path in enumerate(self._paths):
            for place, ended in placed_lines(path, _Ended):
                self._path.append(number)
                self._place.append(place)
                times.append(ended.time)
        self._order = np.argsort(np.asarray(times), kind="stable")

    def __len__(self) -> int:
        return len(self._order)

    def read(self, numbers: Iterable[int]) -> Iterator[tuple[int, Sample]]:
        """Those of these numbers that are whole, each with its own."""
        for number in numbers:
            line = int(self._order[number])
            for sample in lines_at(self._paths[self._path[line]], Sample, [self._place[line]]):
                if sample.is_whole:
                    yield number, sample


def read_samples(run: Path, *, newest_first: bool = False) -> Iterator[Sample]:
    """The samples of every server, in the order in which they ended, or the last one first."""
    files = SampleFiles(run)
    numbers = range(len(files))
    return (sample for _, sample in files.read(reversed(numbers) if newest_first else numbers))


def read_trained(run: Path, tickets: Container[int] | None = None) -> dict[int, Trained]:
    """What was trained, by ticket, of all or these; of one that was trained again after the learner's death, the last
    time."""
    found: dict[int, Trained] = {}
    for path in _files(run / FOLDER / TRAINED):
        for trained in read_lines(path, Trained):
            ticket = trained.ticket_id
            before = found.get(ticket, trained)
            if (tickets is None or ticket in tickets) and trained.step >= before.step:
                found[ticket] = trained
    return found


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))

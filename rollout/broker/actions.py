"""What goes into the broker's core with a result, and what the core asks its shell to do."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from rl.wire.messages import Ticket, Version


class EpisodeOutcome(Struct, frozen=True):
    """What the core knows of a finished episode; `payload` (the trajectory) passes through untouched."""

    timeline: int
    version: int  # v(sample): the oldest of its tokens' versions
    reward: float
    tokens_generated: int  # as the generators told the environment server: the other half of the double entry
    length: int = 0  # generated tokens of the trajectory itself (the loss mask's sum)
    turns: int = 1
    success: float = 0.0
    seconds: float = 0.0
    payload: Any = None
    newest_version: int | None = None  # of its tokens' versions; None: not known
    label: str = ""  # which environment of several it was
    info: dict[str, float] = {}  # the environment's own numbers
    unrewarded: str = ""  # why its reward is not known, if so


class IssueTicket(Struct, frozen=True):
    server: int
    ticket: Ticket


class RevokeTickets(Struct, frozen=True):
    """Stop these episodes and their generations now; each still ends once, by its own message."""

    server: int
    ticket_ids: list[int]


class BatchSample(Struct, frozen=True):
    sample_id: int
    group_id: int
    task_index: int
    version: int  # v(group)
    outcome: EpisodeOutcome


class EmitBatch(Struct, frozen=True):
    """B whole groups in the order of assembly (F4); samples of a group by sample id."""

    step: int
    samples: list[BatchSample]
    metrics: dict[str, float]
    over: float = 0.0  # share of the run's time; from 1 on this is its last batch


class GroupRecord(Struct, frozen=True):
    """The end of one group, for metrics and curricula."""

    group_id: int
    task_index: int
    end: str  # trained | stale | filtered | settled | redundant | failed
    version: int | None
    cut_offs: int  # of its task before
    rewards: list[float]  # of the members that finished, and whose reward is known
    seconds: float  # since it was opened
    success: float | None = None  # mean of these members


class EvalEpisode(Struct, frozen=True):
    """One answered sample of a task of an evaluation."""

    task_index: int
    success: float
    reward: float
    turns: int
    length: int  # generated tokens
    seconds: float
    version: int  # the oldest of its tokens' versions
    label: str = ""  # which environment of several it was
    info: dict[str, float] = {}  # the environment's own numbers
    sample: int = 0  # of its task


class EvalReport(Struct, frozen=True):
    """One evaluation: means over the samples that were answered, how many each version answered, and each episode."""

    version: Version
    tasks: int
    failed: int  # samples
    reward: float
    accuracy: float
    length: float
    versions: dict[int, int]
    seconds: float
    episodes: list[EvalEpisode]
    samples: int = 1  # of each task
    rates: dict[str, tuple[float, float, float]] = {}  # (mean, low, high) over the tasks, of avg and of each pass@k


class Finished(Struct, frozen=True):
    report: dict[str, Any]


class StopRun(Struct, frozen=True):
    """The run cannot go on (or failed its books): one clear line."""

    reason: str


Action = IssueTicket | RevokeTickets | EmitBatch | GroupRecord | EvalReport | Finished | StopRun

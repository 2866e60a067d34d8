"""The ledger: every sample issued and every token generated is in exactly one place, at every instant.

    queued -> running -> waiting -> batched -> trained
       ^         |          |
       +-retry---+          +--> stale | filtered | settled | redundant | failed

Queued and running ones end stale, redundant or failed as well. A constant group is `filtered` with all its results,
`settled` with those of its first episodes, the others of which were never begun.
After the death of the learner batched and trained ones may end stale (`history.py`).

Invariants (`check`):
* samples issued = sum over all states;
* tokens generated = sum over the states + lost. Tokens are what generators report per ticket (`usage`, before or
  after the trajectory). A ticket's tokens stand in the state of its sample while it is the sample's current attempt.
  Those of an attempt that failed stand under `failed`, also when the sample is tried again and trained. So `trained` is
  exactly the useful tokens. A queued sample therefore has no tokens. Tokens of a generator that died stand under
  `lost`, whatever became of the ticket;
* a second copy of a slow episode is booked under `redundant` from its first token, and changes places with the first
  copy when it becomes the sample's current attempt (`promote`);
* double entry: a trajectory's own `tokens_generated` equals the sum of its ticket's usage that was not lost. This does
  not hold for tickets that were at hand when broker or proxy died, or a connection broke. There the trajectory's count
  stands alone, and from then on what is reported of tickets that are over is lost.

All transitions pass through `move`, the only place that changes a state.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import Any

from rl.observe.trace_events import Batched, Delivered, Issued, TakenBack, TicketEnded, TraceEvent
from rl.wire.messages import Ticket
from rollout.broker.records import ENDS, NAMES, Attempt, Sample, State

_CUT_OFF = {State.STALE, State.REDUNDANT, State.FAILED}
_ALLOWED: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING} | _CUT_OFF),
    State.RUNNING: frozenset({State.QUEUED, State.WAITING} | _CUT_OFF),
    State.WAITING: frozenset({State.BATCHED, State.FILTERED, State.SETTLED} | _CUT_OFF),
    State.BATCHED: frozenset({State.TRAINED, State.STALE}),
} | {end: frozenset() for end in ENDS}
_ALLOWED[State.TRAINED] = frozenset({State.STALE})  # taken back: see history.py

RETAINED_TICKETS = 32_768  # ended tickets whose late usage can still be attributed
_COUNTERS = ("issued", "samples", "tokens", "generated", "lost", "attempts_with_tokens", "mismatches", "first_mismatch")


class LedgerError(AssertionError):
    """The books do not close: a defect of the broker, never of its peers."""


class Ledger:
    """Counters by state, and the records of tickets until they are reconciled."""

    def __init__(self) -> None:
        self.issued = 0
        self.samples = [0] * len(State)
        self.tokens = [0] * len(State)
        self.generated = 0
        self.lost = 0
        self.attempts_with_tokens = 0
        self.mismatches = 0
        self.first_mismatch = ""

        self.attempts: dict[int, Attempt] = {}
        self.spares = 0  # samples that have one
        self.unreconciled = 0  # trajectories whose usage has not all arrived
        self._ended: deque[int] = deque()
        self._late: list[int] = []  # tokens of usage for tickets that are not open, each a mismatch
        self._lossy = False  # reports were lost at a time

    def live(self, ticket_id: int) -> Attempt | None:
        attempt = self.attempts.get(ticket_id)
        return attempt if attempt is not None and attempt.live else None

    def issue(self, sample: Sample) -> None:
        self.issued += 1
        self.samples[sample.state] += 1

    def start(self, attempt: Attempt) -> None:
        """A ticket goes out for a queued sample, or a spare one for a running sample."""
        if attempt.sample.state is State.RUNNING:
            attempt.spare = True
            attempt.sample.spare = attempt
            self.spares += 1
        else:
            self.move(attempt.sample, State.RUNNING)
            attempt.sample.attempt = attempt
        self.attempts[attempt.ticket_id] = attempt

    def promote(self, sample: Sample) -> None:
        """The second copy becomes the current attempt, and the first (if it has not failed) the spare one."""
        first = sample.attempt
        second = sample.spare
        assert second is not None and sample.state is State.RUNNING
        if first is not None:
            first.spare = True
            self.tokens[State.RUNNING] -= first.tokens
            self.tokens[State.REDUNDANT] += first.tokens

        second.spare = False
        self.tokens[State.REDUNDANT] -= second.tokens
        self.tokens[State.RUNNING] += second.tokens
        sample.attempt = second
        self.drop_spare(sample)

    def drop_spare(self, sample: Sample) -> None:
        sample.spare = None
        self.spares -= 1

    def move(self, sample: Sample, state: State) -> None:
        old = sample.state
        if state not in _ALLOWED[old]:
            raise LedgerError(f"sample {sample.sample_id} cannot go from {old.name} to {state.name}")
        if sample.spare is not None:  # a running sample has one, and goes on elsewhere
            self.drop_spare(sample)
        sample.state = state
        self.samples[old] -= 1
        self.samples[state] += 1

        if sample.attempt is not None and (tokens := sample.attempt.tokens):
            self.tokens[old] -= tokens
            self.tokens[state] += tokens

    def batched(self, _step: int, samples: list[Sample]) -> None:
        """The batch of this step is made of these samples."""
        for sample in samples:
            self.move(sample, State.BATCHED)

    def supersede(self, sample: Sample) -> None:
        """The current attempt failed: its tokens go to `failed`, the sample has none any more."""
        attempt = sample.attempt
        assert attempt is not None
        self.tokens[sample.state] -= attempt.tokens
        self.tokens[State.FAILED] += attempt.tokens
        sample.attempt = None

    def end(self, attempt: Attempt, claimed: int = -1) -> None:
        """A ticket has ended, with a trajectory that claims so many tokens (-1: without one)."""
        attempt.live = False
        attempt.claimed = claimed
        self._ended.append(attempt.ticket_id)
        if claimed >= 0 and not attempt.by_claim:
            self.unreconciled += 1
            self._reconcile(attempt)
        while len(self._ended) > RETAINED_TICKETS:
            retired = self.attempts.get(self._ended.popleft())
            if retired is not None:
                self._reconcile(retired, is_last=True)

    def usage(self, ticket_id: int, tokens: int, lost: bool) -> None:
        attempt = self.attempts.get(ticket_id)
        if attempt is None or tokens < 0:
            self._mismatch(f"usage of {tokens} tokens for ticket {ticket_id}, which is not open")
            self._late.append(max(0, tokens))
            if self._lossy:
                self._forgive_late()
            return
        self.generated += tokens
        if lost:
            self.lost += tokens
            return

        if attempt.tokens == 0 < tokens:
            self.attempts_with_tokens += 1
        attempt.tokens += tokens
        self.tokens[state_of(attempt)] += tokens
        if attempt.claimed >= 0 and not attempt.by_claim:
            self._reconcile(attempt)

    def reports_lost(self) -> None:
        """Broker or proxy died, or a connection broke: reports of what was sampled for these tickets may be gone."""
        for attempt in self.attempts.values():
            self.unreconciled -= attempt.claimed >= 0 and not attempt.by_claim
            attempt.by_claim = True
        self._lossy = True
        self._forgive_late()

    def _forgive_late(self) -> None:
        """Where answers were lost and asked for again, both may be reported: the later one when its ticket is over."""
        tokens = sum(self._late)
        self.generated += tokens
        self.lost += tokens
        self.mismatches -= len(self._late)
        self._late.clear()
        if not self.mismatches:
            self.first_mismatch = ""

    def give_up_waiting(self) -> None:
        """Stop waiting at the end of the run: usage that has not arrived by now is missing."""
        for attempt in list(self.attempts.values()):
            if attempt.claimed >= 0:
                self._reconcile(attempt, is_last=True)

    def check(self) -> None:
        """Raise LedgerError unless the books close."""
        if self.issued != sum(self.samples) or min(self.samples) < 0:
            raise LedgerError(f"{self.issued} samples issued, states {dict(zip(NAMES, self.samples, strict=True))}")
        if self.generated != sum(self.tokens) + self.lost or min(self.tokens) < 0:
            raise LedgerError(f"{self.generated} tokens generated, {self.lost} lost, states {self.tokens}")
        if self.tokens[State.QUEUED]:
            raise LedgerError(f"{self.tokens[State.QUEUED]} tokens of queued samples")

    # ------------------------------------------------------------ for the trace: `TracedLedger` does something

    def evaluation_started(self, ticket: Ticket, server: int) -> None:
        """Evaluations stand outside the books."""

    def evaluation_ended(self, ticket_id: int, end: str) -> None:
        """end: `evaluated`, `failed`, or `stale` if the learner has taken the version back."""

    def take_events(self) -> list[TraceEvent]:
        """What has happened to tickets since the last call."""
        return []

    # ------------------------------------------------------------ what can be seen from outside

    @property
    def useful_share(self) -> float:
        """The share that was trained, of all tokens that are lost or whose sample has ended; 0 before there are any."""
        trained = self.tokens[State.TRAINED]
        return trained / (trained + self.unused) if trained else 0.0

    @property
    def unused(self) -> int:
        """Tokens that are lost, or whose sample has ended without being trained."""
        return sum(self.tokens[end] for end in ENDS if end is not State.TRAINED) + self.lost

    def report(self) -> dict[str, dict[str, int]]:
        samples = {"issued": self.issued} | dict(zip(NAMES, self.samples, strict=True))
        tokens = {"generated": self.generated} | dict(zip(NAMES[1:], self.tokens[1:], strict=True))
        return {"samples": samples, "tokens": tokens | {"lost": self.lost}}

    def snapshot(self, leaving: list[Sample]) -> dict[str, Any]:
        """The counters without the samples of open groups: these are issued anew after a restore.

        Tokens of their earlier, failed attempts stay under `failed`: that work was done.
        """
        counters = {name: copy(getattr(self, name)) for name in _COUNTERS}
        for sample in leaving:
            counters["issued"] -= 1
            counters["samples"][sample.state] -= 1
            if sample.attempt is not None:
                tokens = sample.attempt.tokens
                counters["tokens"][sample.state] -= tokens
                counters["generated"] -= tokens
                counters["attempts_with_tokens"] -= tokens > 0
        return counters

    def restore(self, counters: dict[str, Any]) -> None:
        for name in _COUNTERS:
            setattr(self, name, counters[name])

    def _reconcile(self, attempt: Attempt, *, is_last: bool = False) -> None:
        """Compare the two entries of an ended ticket, and forget it unless more usage may be on its way."""
        if attempt.tokens < attempt.claimed and not is_last:
            return
        del self.attempts[attempt.ticket_id]
        if attempt.claimed >= 0 and attempt.by_claim:
            self._book_claim(attempt)
        elif attempt.claimed >= 0:
            self.unreconciled -= 1
            if attempt.tokens != attempt.claimed:
                claim = f"its trajectory claims {attempt.claimed} tokens, generators reported {attempt.tokens}"
                self._mismatch(f"ticket {attempt.ticket_id}: {claim}")

    def _book_claim(self, attempt: Attempt) -> None:
        """Tokens of which no report came are generated; those reported beyond the claim were asked for again: lost."""
        missing = attempt.claimed - attempt.tokens
        self.attempts_with_tokens += attempt.tokens == 0 < missing
        attempt.tokens = attempt.claimed
        self.tokens[state_of(attempt)] += missing
        self.generated += max(0, missing)
        self.lost += max(0, -missing)

    def _mismatch(self, what: str) -> None:
        self.mismatches += 1
        self.first_mismatch = self.first_mismatch or what


def state_of(attempt: Attempt) -> State:
    """The state under which the attempt's tokens are booked."""
    if attempt.spare:
        return State.REDUNDANT
    return attempt.sample.state if attempt.sample.attempt is attempt else State.FAILED


class TracedLedger(Ledger):
    """A ledger that also says what became of every ticket, for the trace. The process writes it down.

    A ticket ends when it is decided what its work was for. That may be before its episode has ended (its group was cut
    off) or long after (its batch was trained). `_open` holds those that have not ended, so that each does so once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: list[TraceEvent] = []
        self._open: set[int] = set()

    def start(self, attempt: Attempt) -> None:
        super().start(attempt)
        self._tell_issue(attempt.ticket, attempt.server)

    def end(self, attempt: Attempt, claimed: int = -1) -> None:
        super().end(attempt, claimed)
        if claimed >= 0:
            self._events.append(Delivered(attempt.ticket_id, claimed))

    def move(self, sample: Sample, state: State) -> None:
        was_trained = sample.state is State.TRAINED
        super().move(sample, state)
        if sample.attempt is None or state not in ENDS:
            return
        if was_trained:
            self._events.append(TakenBack(sample.attempt.ticket_id))
        self._settle(sample.attempt.ticket_id, NAMES[state], sample.attempt.failure)

    def supersede(self, sample: Sample) -> None:
        attempt = sample.attempt
        super().supersede(sample)
        if attempt is not None:
            self._settle(attempt.ticket_id, NAMES[State.FAILED], attempt.failure)

    def promote(self, sample: Sample) -> None:
        first = sample.attempt
        super().promote(sample)
        if first is not None:
            self._settle(first.ticket_id, NAMES[State.REDUNDANT])

    def drop_spare(self, sample: Sample) -> None:
        spare = sample.spare
        super().drop_spare(sample)
        if spare is not None and spare is not sample.attempt:
            end = State.FAILED if spare.failure else State.REDUNDANT
            self._settle(spare.ticket_id, NAMES[end], spare.failure)

    def batched(self, step: int, samples: list[Sample]) -> None:
        super().batched(step, samples)
        tickets = tuple(sample.attempt.ticket_id for sample in samples if sample.attempt is not None)
        self._events.append(Batched(step, tickets))

    def take_events(self) -> list[TraceEvent]:
        events = self._events
        self._events = []
        return events

    def evaluation_started(self, ticket: Ticket, server: int) -> None:
        self._tell_issue(ticket, server)

    def evaluation_ended(self, ticket_id: int, end: str) -> None:
        self._settle(ticket_id, end)

    def _tell_issue(self, ticket: Ticket, server: int) -> None:
        self._open.add(ticket.ticket_id)
        ids = (ticket.group_id, ticket.sample_id, ticket.task_index)
        self._events.append(Issued(ticket.ticket_id, ticket.kind, *ids, ticket.version.n, ticket.attempt, server))

    def _settle(self, ticket_id: int, end: str, reason: str = "") -> None:
        if ticket_id in self._open:
            self._open.remove(ticket_id)
            self._events.append(TicketEnded(ticket_id, end, reason))

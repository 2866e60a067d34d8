"""The ledger: every sample issued and every token generated is in exactly one place, at every instant.

    queued -> running -> waiting -> batched -> trained
       ^         |          |
       +-retry---+          +--> stale | filtered | redundant | failed      (queued and running end so as well)

Invariants (`check`):
* samples issued = sum over the nine states;
* tokens generated = sum over the states + lost. Tokens are what generators report per ticket (`usage`, before or
  after the trajectory). A ticket's tokens stand in the state of its sample while it is the sample's
  current attempt; those of an attempt that failed stand under `failed`, also when the sample is tried again
  and trained, so that `trained` is exactly the useful tokens. A queued sample therefore has no tokens.
  Tokens of a generator that died stand under `lost`, whatever became of the ticket;
* a second copy of a slow episode is booked under `redundant` from its first token, and changes places with the first
  copy when it becomes the sample's current attempt (`promote`);
* double entry: a trajectory's own `tokens_generated` equals the sum of its ticket's usage that was not lost.

All transitions pass through `move`, the only place that changes a state.
"""

from __future__ import annotations

from collections import deque
from copy import copy
from typing import Any

from rollout.broker.records import ENDS, NAMES, Attempt, Sample, State

_CUT_OFF = {State.STALE, State.REDUNDANT, State.FAILED}
_ALLOWED: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING} | _CUT_OFF),
    State.RUNNING: frozenset({State.QUEUED, State.WAITING} | _CUT_OFF),
    State.WAITING: frozenset({State.BATCHED, State.FILTERED} | _CUT_OFF),
    State.BATCHED: frozenset({State.TRAINED}),
} | {end: frozenset() for end in ENDS}

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
        self.unreconciled = 0  # trajectories whose usage has not all arrived
        self._ended: deque[int] = deque()

    def live(self, ticket_id: int) -> Attempt | None:
        attempt = self.attempts.get(ticket_id)
        return attempt if attempt is not None and attempt.live else None

    def issue(self, sample: Sample) -> None:
        self.issued += 1
        self.samples[sample.state] += 1

    def start(self, attempt: Attempt) -> None:
        """A ticket goes out for a queued sample, or a spare one for a running sample."""
        if attempt.spare:
            attempt.sample.spare = attempt
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
        sample.spare = None

    def move(self, sample: Sample, state: State) -> None:
        old = sample.state
        if state not in _ALLOWED[old]:
            raise LedgerError(f"sample {sample.sample_id} cannot go from {old.name} to {state.name}")
        sample.state = state
        self.samples[old] -= 1
        self.samples[state] += 1

        if sample.attempt is not None and (tokens := sample.attempt.tokens):
            self.tokens[old] -= tokens
            self.tokens[state] += tokens

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
        if claimed >= 0:
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
            return
        self.generated += tokens
        if lost:
            self.lost += tokens
            return

        if attempt.tokens == 0 < tokens:
            self.attempts_with_tokens += 1
        attempt.tokens += tokens
        self.tokens[state_of(attempt)] += tokens
        if attempt.claimed >= 0:
            self._reconcile(attempt)

    def give_up_waiting(self) -> None:
        """At the end of the run: usage that has not arrived by now is missing."""
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
        if attempt.claimed >= 0:
            self.unreconciled -= 1
            if attempt.tokens != attempt.claimed:
                claim = f"its trajectory claims {attempt.claimed} tokens, generators reported {attempt.tokens}"
                self._mismatch(f"ticket {attempt.ticket_id}: {claim}")

    def _mismatch(self, what: str) -> None:
        self.mismatches += 1
        self.first_mismatch = self.first_mismatch or what


def state_of(attempt: Attempt) -> State:
    """Under which its tokens are booked."""
    if attempt.spare:
        return State.REDUNDANT
    return attempt.sample.state if attempt.sample.attempt is attempt else State.FAILED

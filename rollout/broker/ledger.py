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


class LedgerError(AssertionError):
    """The books do not close: a defect of the broker, never of its peers."""


class Ledger:
    """Counters by state, and the records of tickets until they are reconciled.

    With `audit` every sample and ticket is kept for ever, so that `check` recounts from scratch (tests).
    """

    def __init__(self, *, audit: bool = False) -> None:
        self.issued = 0
        self.samples = [0] * len(State)
        self.tokens = [0] * len(State)
        self.generated = 0
        self.lost = 0
        self.attempts: dict[int, Attempt] = {}
        self.attempts_with_tokens = 0
        self.unreconciled = 0  # trajectories whose usage has not all arrived
        self.mismatches = 0
        self.first_mismatch = ""
        self._ended: deque[int] = deque()
        self._audit: tuple[list[Sample], list[Attempt]] | None = ([], []) if audit else None
        self._base = self._counters()

    def issue(self, sample: Sample) -> None:
        self.issued += 1
        self.samples[sample.state] += 1
        if self._audit:
            self._audit[0].append(sample)

    def start(self, sample: Sample, attempt: Attempt) -> None:
        """A ticket goes out for a queued sample."""
        self.move(sample, State.RUNNING)
        sample.attempt = attempt
        self.attempts[attempt.ticket_id] = attempt
        if self._audit:
            self._audit[1].append(attempt)

    def hedge(self, sample: Sample, attempt: Attempt) -> None:
        """A second ticket goes out for a running sample."""
        attempt.spare = True
        sample.hedge = attempt
        self.attempts[attempt.ticket_id] = attempt
        if self._audit:
            self._audit[1].append(attempt)

    def promote(self, sample: Sample) -> None:
        """The second copy becomes the current attempt, and the first (if it has not failed) the spare one."""
        first, second = sample.attempt, sample.hedge
        assert second is not None and sample.state is State.RUNNING
        if first is not None:
            first.spare = True
            self.tokens[State.RUNNING] -= first.tokens
            self.tokens[State.REDUNDANT] += first.tokens
        second.spare = False
        self.tokens[State.REDUNDANT] -= second.tokens
        self.tokens[State.RUNNING] += second.tokens
        sample.attempt, sample.hedge, sample.version = second, None, second.version

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
        sample.version = None

    def end(self, attempt: Attempt, claimed: int = -1) -> None:
        """A ticket has ended, with a trajectory that claims so many tokens (-1: without one)."""
        attempt.live = False
        attempt.claimed = claimed
        self._ended.append(attempt.ticket_id)
        if claimed >= 0:
            self.unreconciled += 1
            self._reconcile(attempt)
        while len(self._ended) > RETAINED_TICKETS:
            self._retire(self._ended.popleft())

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
        self.tokens[_book(attempt)] += tokens
        if attempt.claimed >= 0:
            self._reconcile(attempt)

    def give_up_waiting(self) -> None:
        """At the end of the run: usage that has not arrived by now is missing."""
        for attempt in list(self.attempts.values()):
            if attempt.claimed >= 0:
                self._retire(attempt.ticket_id)

    def check(self) -> None:
        """Raise LedgerError unless the books close; recounts from scratch when auditing."""
        if self.issued != sum(self.samples) or min(self.samples) < 0:
            raise LedgerError(f"{self.issued} samples issued, states {dict(zip(NAMES, self.samples, strict=True))}")
        if self.generated != sum(self.tokens) + self.lost or min(self.tokens) < 0:
            raise LedgerError(f"{self.generated} tokens generated, {self.lost} lost, states {self.tokens}")
        if self.tokens[State.QUEUED]:
            raise LedgerError(f"{self.tokens[State.QUEUED]} tokens of queued samples")
        if self._audit is None:
            return
        samples, tokens = list(self._base["samples"]), list(self._base["tokens"])
        for sample in self._audit[0]:
            samples[sample.state] += 1
        for attempt in self._audit[1]:
            tokens[_book(attempt)] += attempt.tokens
        if samples != self.samples or tokens != self.tokens:
            raise LedgerError(f"counted {samples}, {tokens}; the books say {self.samples}, {self.tokens}")

    def report(self) -> dict[str, dict[str, int]]:
        samples = {"issued": self.issued} | dict(zip(NAMES, self.samples, strict=True))
        tokens = {"generated": self.generated} | dict(zip(NAMES[1:], self.tokens[1:], strict=True))
        return {"samples": samples, "tokens": tokens | {"lost": self.lost}}

    def snapshot(self, leaving: list[Sample]) -> dict[str, Any]:
        """The counters without the samples of open groups: these are issued anew after a restore.

        Tokens of their earlier, failed attempts stay under `failed`: that work was done.
        """
        issued, samples, tokens = self.issued, list(self.samples), list(self.tokens)
        generated, with_tokens = self.generated, self.attempts_with_tokens
        for sample in leaving:
            issued -= 1
            samples[sample.state] -= 1
            if sample.attempt is not None:
                tokens[sample.state] -= sample.attempt.tokens
                generated -= sample.attempt.tokens
                with_tokens -= sample.attempt.tokens > 0
        return self._counters() | {
            "issued": issued,
            "samples": samples,
            "tokens": tokens,
            "generated": generated,
            "attempts_with_tokens": with_tokens,
        }

    def restore(self, counters: dict[str, Any]) -> None:
        for name in self._counters():
            setattr(self, name, counters[name])
        self._base = self._counters()

    def _counters(self) -> dict[str, Any]:
        return {
            "issued": self.issued,
            "samples": list(self.samples),
            "tokens": list(self.tokens),
            "generated": self.generated,
            "lost": self.lost,
            "attempts_with_tokens": self.attempts_with_tokens,
            "mismatches": self.mismatches,
            "first_mismatch": self.first_mismatch,
        }

    def _reconcile(self, attempt: Attempt) -> None:
        if attempt.tokens < attempt.claimed:
            return  # more usage is on its way
        if attempt.tokens > attempt.claimed:
            self._mismatch(
                f"ticket {attempt.ticket_id}: generators report {attempt.tokens} tokens, "
                f"its trajectory {attempt.claimed}"
            )
        self.unreconciled -= 1
        del self.attempts[attempt.ticket_id]

    def _retire(self, ticket_id: int) -> None:
        attempt = self.attempts.pop(ticket_id, None)
        if attempt is not None and attempt.claimed >= 0:
            self.unreconciled -= 1
            self._mismatch(
                f"ticket {ticket_id}: its trajectory claims {attempt.claimed} tokens, "
                f"generators reported {attempt.tokens}"
            )

    def _mismatch(self, what: str) -> None:
        self.mismatches += 1
        self.first_mismatch = self.first_mismatch or what


def _book(attempt: Attempt) -> State:
    if attempt.spare:
        return State.REDUNDANT
    return attempt.sample.state if attempt.sample.attempt is attempt else State.FAILED

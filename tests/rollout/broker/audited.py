"""A ledger that keeps every sample and ticket for ever, so that `check` recounts the books from scratch.

What it tells the trace must hold as well: every ticket ends once, after its issue, as its sample's state says.
"""

from __future__ import annotations

from typing import Any

from rl.observe.trace_events import Batched, Delivered, Issued, TakenBack, TicketEnded, TraceEvent
from rollout.broker.ledger import LedgerError, TracedLedger, state_of
from rollout.broker.records import NAMES, Attempt, Sample, State


class AuditedLedger(TracedLedger):
    def __init__(self) -> None:
        super().__init__()
        self._all_samples: list[Sample] = []
        self._all_attempts: list[Attempt] = []
        self._restored_samples = list(self.samples)
        self._restored_tokens = list(self.tokens)
        self.ends: dict[int, str | None] = {}  # of every ticket; None: it goes on

    def issue(self, sample: Sample) -> None:
        super().issue(sample)
        self._all_samples.append(sample)

    def start(self, attempt: Attempt) -> None:
        super().start(attempt)
        self._all_attempts.append(attempt)

    def restore(self, counters: dict[str, Any]) -> None:
        super().restore(counters)
        self._restored_samples = list(self.samples)
        self._restored_tokens = list(self.tokens)

    def check(self) -> None:
        super().check()
        samples = list(self._restored_samples)
        tokens = list(self._restored_tokens)
        for sample in self._all_samples:
            samples[sample.state] += 1
        for attempt in self._all_attempts:
            tokens[state_of(attempt)] += attempt.tokens
        if samples != self.samples or tokens != self.tokens:
            raise LedgerError(f"counted {samples}, {tokens}; the books say {self.samples}, {self.tokens}")

    def check_events(self) -> None:
        """Once the run has ended: those who began have ended, and those of samples that count are among them."""
        for event in self.take_events():
            self._told(event)
        assert None not in self.ends.values(), "a ticket has no end"

        kept = {attempt.ticket_id for attempt in self._all_attempts if attempt.sample.attempt is attempt}
        for attempt in self._all_attempts:
            end = self.ends[attempt.ticket_id]
            expected = NAMES[attempt.sample.state] if attempt.ticket_id in kept else None
            assert end == expected or (expected is None and end in ("failed", "redundant"))

        evaluated = self.ends.keys() - {attempt.ticket_id for attempt in self._all_attempts}
        assert {self.ends[ticket] for ticket in evaluated} <= {"evaluated", "failed", "stale"}

    def _told(self, event: TraceEvent) -> None:
        match event:
            case Issued(ticket):
                assert ticket not in self.ends
                self.ends[ticket] = None
            case TicketEnded(ticket, end):
                assert self.ends[ticket] is None, "a ticket ends twice"
                self.ends[ticket] = end
            case TakenBack(ticket):
                assert self.ends[ticket] == NAMES[State.TRAINED]
                self.ends[ticket] = NAMES[State.STALE]
            case Delivered(ticket):
                assert ticket in self.ends
            case Batched(_, tickets):
                assert all(self.ends[ticket] is None for ticket in tickets)
            case _:
                raise AssertionError(f"{event} is not the broker's to tell")

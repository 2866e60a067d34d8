"""A ledger that also says what became of every ticket, for the trace. Pure, as the ledger is: the process writes.

A ticket ends when it is decided what its work was for. That may be before its episode has ended (its group was cut off)
or long after (its batch was trained). `_open` holds those that have not ended, so that each does so once.
"""

from __future__ import annotations

from rl.observe.trace_events import Batched, Delivered, Issued, TakenBack, TicketEnded, TraceEvent
from rl.wire.messages import Ticket
from rollout.broker.ledger import Ledger
from rollout.broker.records import ENDS, NAMES, Attempt, Sample, State


class TracedLedger(Ledger):
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

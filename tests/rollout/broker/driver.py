"""A broker's core with a generous environment server, for tests of its rules."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from rl.wire.messages import Ticket, Version
from rollout.broker.actions import (
    Action,
    EmitBatch,
    EpisodeOutcome,
    IssueTicket,
    RevokeTickets,
)
from rollout.broker.core import BrokerCore
from rollout.broker.rules import Rules
from tests.rollout.broker.audited import AuditedLedger


def rules(**changes: Any) -> Rules:
    base: dict[str, Any] = {"steps": 4, "groups_per_batch": 2, "group_size": 2, "train_tasks": 50, "alpha": 0}
    return Rules(**(base | changes))


def of(actions: list[Action], kind: type) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


class Driver:
    """A core with a generous server; keeps what is live and what was emitted."""

    def __init__(
        self,
        of_run: Rules,
        capacity: int = 100,
        state: dict[str, Any] | None = None,
        timeline: int = 0,
        data: Mapping[str, str] = MappingProxyType({}),
        new_data: bool = False,
    ) -> None:
        self.core = BrokerCore(of_run, ledger=AuditedLedger(), data=data)
        self.timeline = timeline
        if state is not None:
            self.core.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(state)), new_data)

        self.live: dict[int, Ticket] = {}
        self.cancelled: list[int] = []
        self.actions: list[Action] = []
        self.now = 0.0
        self.do(self.core.server_joined(0, 0, capacity, self.now))

    def do(self, actions: list[Action]) -> list[Action]:
        self.core.ledger.check()
        self.actions += actions
        for action in actions:
            if isinstance(action, IssueTicket):
                self.live[action.ticket.ticket_id] = action.ticket
            elif isinstance(action, RevokeTickets):
                self.cancelled += action.ticket_ids
        return actions

    def publish(self, n: int) -> list[Action]:
        return self.do(self.core.published(Version(self.timeline, n), self.now))

    def request(self, step: int) -> list[Action]:
        return self.do(self.core.batch_requested(step, self.now))

    def begin(self, ticket: Ticket, version: int) -> list[Action]:
        return self.do(self.core.first_token(ticket.ticket_id, Version(self.timeline, version), self.now))

    def finish(
        self,
        ticket: Ticket,
        version: int,
        reward: float = 1.0,
        tokens: int = 5,
        *,
        late: bool = False,
        unrewarded: str = "",
    ) -> list[Action]:
        """late: the generators' report comes after the trajectory."""
        self.live.pop(ticket.ticket_id, None)
        outcome = EpisodeOutcome(
            self.timeline,
            version,
            reward,
            tokens,
            tokens,
            success=reward,
            payload=ticket.ticket_id,
            unrewarded=unrewarded,
        )

        reported = ticket.kind == "train"
        actions: list[Action] = []
        if reported and not late:
            actions += self.do(self.core.usage(ticket.ticket_id, tokens, False, self.now))
        actions += self.do(self.core.finished(ticket.ticket_id, outcome, self.now))
        if reported and late:
            actions += self.do(self.core.usage(ticket.ticket_id, tokens, False, self.now))
        return actions

    def fail(self, ticket: Ticket) -> list[Action]:
        self.live.pop(ticket.ticket_id)
        return self.do(self.core.failed(ticket.ticket_id, "boom", self.now))

    def confirm_cancels(self) -> None:
        while self.cancelled:
            ticket_id = self.cancelled.pop()
            self.live.pop(ticket_id, None)
            self.do(self.core.cancelled(ticket_id, self.now))

    def group(self, group_id: int) -> list[Ticket]:
        return sorted((t for t in self.live.values() if t.group_id == group_id), key=lambda t: t.sample_id)

    def finish_group(self, group_id: int, version: int, rewards: tuple[float, ...] = (1.0, 0.0)) -> list[Action]:
        actions: list[Action] = []
        for ticket, reward in zip(self.group(group_id), rewards, strict=False):
            actions += self.finish(ticket, version, reward)
        return actions

    def samples(self, state: str) -> int:
        return self.core.ledger.report()["samples"][state]


def groups_of(batch: EmitBatch) -> list[int]:
    return list(dict.fromkeys(sample.group_id for sample in batch.samples))

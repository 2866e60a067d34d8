"""Turns messages into events of the core, in their order: the part of the broker that its write-ahead log keeps.

It has no sockets and no clock. The same messages at the same times lead to the same state and the same actions.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rl.wire import messages
from rl.wire.messages import Message, ProtocolError
from rollout.broker.actions import Action
from rollout.broker.assembly import outcome_of
from rollout.broker.core import BrokerCore
from rollout.broker.validation import LONGEST_REASON, NOT_LIVE, fault

ServerMessage = messages.Trajectory | messages.TicketFailed | messages.TicketCancelled | messages.ServerHello
ProxyMessage = messages.Usage | messages.FirstToken | messages.ReportsLost
T = TypeVar("T")


class Intake:
    """Whoever sends empties `acks` (tickets whose end has been taken, by server and incarnation) and `refused`.

    Whoever watches empties `rewards`: of each result that was taken, why its reward is not known, or the empty string.
    """

    def __init__(self, core: BrokerCore, vocabulary: int) -> None:
        self.core = core
        self.vocabulary = vocabulary
        self.acks: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        self.refused: list[str] = []
        self.rewards: list[str] = []
        self.trajectories = 0
        self.closed = False  # the run is to be saved: no batch is assembled any more
        self._orders: defaultdict[tuple[int, int], Reorder[ServerMessage]] = defaultdict(Reorder)  # by incarnation

    def take(self, message: Message | None, now: float) -> list[Action]:
        """Take one message; None says that a deadline has passed. Raises ProtocolError for what makes no sense from its
        sender."""
        core = self.core
        match message:
            case None:
                return core.tick(now)
            case messages.Usage(session, tokens, lost):
                return core.usage(session, tokens, lost, now)
            case messages.FirstToken(_, session, version):
                return core.first_token(session, version, now)
            case messages.ReportsLost():
                core.ledger.reports_lost()
                return []

            case messages.BatchRequest(step):
                return [] if self.closed else core.batch_requested(step, now)
            case messages.Published(version):
                return core.published(version, now)
            case messages.EvalRequest(version, tasks):
                return core.eval_requested(version, tasks, now)

            case messages.PeerDied("env_server", index, incarnation):
                self._orders.pop((index, incarnation), None)
                return core.server_left(index, incarnation, now)
            case messages.PeerDied("broker" | "proxy"):
                core.ledger.reports_lost()
                return []
            case messages.PeerDied():
                return []

            case messages.Stop():
                self.closed = True
                core.batches.requested.clear()
                return []
        assert isinstance(message, ServerMessage)
        return self._from_server(message, now)

    def _from_server(self, message: ServerMessage, now: float) -> list[Action]:
        """Messages of one server, from either socket, in the order of their sequence numbers."""
        key = (message.server, message.incarnation)
        if self.core.servers.is_dead(*key):
            return []

        order = self._orders[key]
        try:
            due = order.push(message.seq, message)
        except ValueError as error:
            raise ProtocolError(f"sequence of environment server {key}: {error}") from None

        taken = due or ([message] if message.seq < order.next else [])  # before: its acknowledgement was lost
        if ended := [each.ticket_id for each in taken if not isinstance(each, messages.ServerHello)]:
            self.acks[key] += ended
        if isinstance(message, messages.ServerHello):
            due = taken  # again, after the broker's death
        return [action for each in due for action in self._server_event(each, now)]

    def _server_event(self, message: ServerMessage, now: float) -> list[Action]:
        core = self.core
        match message:
            case messages.Trajectory():
                self.trajectories += 1
                newest = messages.Version(core.timeline, core.groups.e)
                wrong = fault(message, core.ticket(message.ticket_id), newest, self.vocabulary)
                if not wrong:
                    outcome = outcome_of(message)
                    self.rewards.append(outcome.unrewarded)
                    return core.finished(message.ticket_id, outcome, now)

                if wrong != NOT_LIVE:
                    self.refused.append(f"trajectory of environment server {message.server}: {wrong}")
                return core.refused(message.ticket_id, wrong, now)

            case messages.TicketFailed(ticket_id=ticket_id, reason=reason, turns=turns):
                return core.failed(ticket_id, reason[:LONGEST_REASON], now, turns)
            case messages.TicketCancelled(ticket_id=ticket_id, turns=turns):
                return core.cancelled(ticket_id, now, turns)
            case messages.ServerHello(server, incarnation, capacity, tickets=held):
                return core.server_joined(server, incarnation, capacity, now, held)

    def knows(self, server: int, incarnation: int) -> bool:
        """Whether this server has said hello, and may have died since."""
        return (server, incarnation) in self._orders or self.core.servers.is_dead(server, incarnation)

    def awaited(self) -> str:
        """Whom the next batch waits for, in words."""
        core = self.core
        if core.timeline < 0:
            return "the learner's first version"
        if not core.servers.by_index:
            return "an environment server"
        if late := {index: order.waiting for (index, _), order in self._orders.items() if order.waiting}:
            return f"missing messages of environment servers {late}"
        groups = f"{core.groups.ready} of {core.rules.groups_per_batch} groups ready"
        return f"{core.servers.outstanding} episodes of the environment servers ({groups})"


@dataclass(slots=True, eq=False)
class Reorder(Generic[T]):
    """The order of one server's messages, which travel on two sockets but share one sequence number.

    Without it a hello or a failure could overtake a result. Numbers are per incarnation, from 0.
    `push` returns what is due, in order; a number seen before returns nothing and counts as a duplicate.

    At most `limit` messages wait for a missing one: a server has no more open, so more is a fault of the peer.
    """

    limit: int = 100_000
    next: int = 0
    duplicates: int = 0
    _early: dict[int, T] = field(default_factory=dict)

    def push(self, seq: int, message: T) -> list[T]:
        """Raises ValueError for a number that no server would send."""
        if seq < self.next or seq in self._early:
            self.duplicates += 1
            return []
        if seq > self.next:
            if seq - self.next > self.limit:
                raise ValueError(f"message {seq} while {self.next} is awaited")
            self._early[seq] = message
            return []

        due = [message]
        self.next += 1
        while self._early and (follower := self._early.pop(self.next, None)) is not None:
            due.append(follower)
            self.next += 1
        return due

    @property
    def waiting(self) -> int:
        """Messages that wait for one before them."""
        return len(self._early)

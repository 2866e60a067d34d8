"""What an environment server should have, against what it has: tickets on their way to it are lost with a broker."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rollout.broker.actions import Action, IssueTicket, RevokeTickets
from rollout.broker.evaluation import EvalAttempt
from rollout.broker.records import Attempt
from rollout.broker.servers import Server


def compare_tickets(
    server: Server, held: Collection[int], find: Callable[[int], Attempt | EvalAttempt | None]
) -> list[Action]:
    """What has not arrived goes out again; what nobody waits for is revoked, and ends by the server's word."""
    actions: list[Action] = []
    for ticket_id in sorted(server.live.difference(held)):
        if (attempt := find(ticket_id)) is not None and attempt.ticket is not None:
            actions.append(IssueTicket(server.index, attempt.ticket))

    unwanted = [
        ticket_id
        for ticket_id in sorted(server.live.union(held))
        if (attempt := find(ticket_id)) is None or not attempt.is_running
    ]
    if unwanted:
        actions.append(RevokeTickets(server.index, unwanted))
    return actions

"""The worked example of docs/freshness.md, event by event, on the production object."""

from __future__ import annotations

from pathlib import Path

import rollout.broker
from rl.wire.messages import Version
from rollout.broker.actions import Action, EmitBatch, EpisodeOutcome, GroupRecord, IssueTicket
from rollout.broker.core import BrokerCore
from rollout.broker.rules import Rules

Batch = list[tuple[int, int]]
"""Number and version of each group."""


class Example:
    """B = 2, alpha = 1, P = 1, groups of one episode, one server with room for all."""

    def __init__(self) -> None:
        self.core = BrokerCore(
            Rules(steps=8, groups_per_batch=2, group_size=1, train_tasks=100, alpha=1.0, hold_patience=1.0)
        )
        self.tickets: dict[int, int] = {}
        self.tasks: dict[int, int] = {}
        self.issued: list[tuple[int, int]] = []
        self.batches: dict[int, Batch] = {}
        self.ended: dict[int, str] = {}

        self.see(self.core.server_joined(0, 0, 64, 0.0))

    def see(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case IssueTicket(_, ticket):
                    self.tickets[ticket.group_id] = ticket.ticket_id
                    self.tasks[ticket.group_id] = ticket.task_index
                    self.issued.append((ticket.group_id, ticket.version.n))
                case EmitBatch(step, samples):
                    self.batches[step] = [(sample.group_id, sample.version) for sample in samples]
                case GroupRecord(group_id=group_id, end=end):
                    self.ended[group_id] = end

    def publish(self, version: int) -> list[tuple[int, int]]:
        """The tickets that go out: group and gate."""
        before = len(self.issued)
        self.see(self.core.published(Version(0, version), 0.0))
        return self.issued[before:]

    def first_token(self, group: int, version: int) -> None:
        self.see(self.core.first_token(self.tickets[group], Version(0, version), 0.0))

    def finish(self, group: int, version: int) -> None:
        outcome = EpisodeOutcome(timeline=0, version=version, reward=1.0, tokens_generated=0)
        self.see(self.core.finished(self.tickets[group], outcome, 0.0))

    def request(self, step: int) -> None:
        self.see(self.core.batch_requested(step, 0.0))


def test_the_example_of_the_freshness_page() -> None:
    example = Example()

    assert example.publish(0) == [(0, 0), (1, 0), (2, 0), (3, 0)]  # F1: at most (1 + alpha) B = 4 groups
    for group in range(4):
        example.first_token(group, 0)
    example.request(0)
    example.finish(1, 0)
    example.finish(2, 0)
    assert example.batches == {0: [(1, 0), (2, 0)]}  # F4: group 0 is overtaken

    assert example.publish(1) == [(4, 1), (5, 1)]
    example.request(1)
    example.first_token(4, 1)
    example.first_token(5, 1)
    example.finish(3, 0)
    example.finish(4, 1)
    assert example.batches[1] == [(3, 0), (4, 1)]  # F5 waits for nobody: group 0 was never cut off

    assert example.ended[0] == "stale"  # F3: no later batch can use version 0
    assert example.issued[-1] == (6, 1)
    assert example.tasks[6] == example.tasks[0]

    assert example.publish(2) == [(7, 2), (8, 2)]
    example.request(2)
    example.first_token(6, 1)
    example.finish(5, 1)
    example.first_token(7, 2)
    example.finish(7, 2)
    assert 2 not in example.batches  # F5: two groups are ready, and the batch waits for group 6

    example.finish(6, 1)
    assert example.batches[2] == [(6, 1), (5, 1)]  # the long task is trained, with staleness 1
    assert set(example.ended.values()) == {"stale", "trained"}


def test_the_rules_are_read_in_a_few_pages_and_meet_no_hook() -> None:
    """F1 to F5 stand in four files; what is optional stands elsewhere."""
    folder = Path(rollout.broker.__file__).parent
    texts = [(folder / f"{name}.py").read_text() for name in ("rules", "tickets", "groups", "batches")]
    assert sum(len(text.splitlines()) for text in texts) < 400
    for text in texts:
        assert "spare" not in text and "hook" not in text and "broker.copies" not in text

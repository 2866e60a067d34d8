"""The broker goes on from its log as if it had not died, and says when it cannot."""

from __future__ import annotations

import errno
import os
import pickle
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.wire.messages import BatchRequest, Message, PeerDied, Published, ServerHello, TicketFailed, Version, encode
from rollout.broker import BrokerCore, Rules, write_ahead
from rollout.broker.actions import IssueTicket, RevokeTickets
from rollout.broker.intake import Intake
from rollout.broker.write_ahead import LogDamaged, WriteAheadLog
from tests.rollout.broker.test_properties import configurations
from tests.rollout.broker.world import World
from tests.rollout.trajectories import make_trajectory

EVENTS = {
    *("published", "batch_requested", "eval_requested", "server_joined", "server_left", "finished", "failed"),
    *("refused", "cancelled", "first_token", "usage", "tick"),
}


class Recorded:
    """A core whose process dies now and then: its state of some time ago, and the events since, give the same core."""

    def __init__(self, core: BrokerCore) -> None:
        self._core = core
        self.remember()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._core, name)
        if name not in EVENTS:
            return value

        def event(*arguments: Any) -> Any:
            self._events.append((name, arguments))
            return value(*arguments)

        return event

    def remember(self) -> None:
        self._state = pickle.dumps(self._core)
        self._events: list[tuple[str, Any]] = []

    def die(self) -> None:
        successor: BrokerCore = pickle.loads(self._state)
        for name, arguments in self._events:
            getattr(successor, name)(*arguments)
        assert successor.describe() == self._core.describe()
        assert successor.snapshot() == self._core.snapshot()
        self._core = successor


@settings(max_examples=40)
@given(config=configurations(), seed=st.integers(0, 2**32), events=st.integers(0, 200))
def test_any_events_since_any_state_lead_to_the_same_core(config: Rules, seed: int, events: int) -> None:
    world = World(config, seed)
    world.core = recorded = Recorded(world.core)  # type: ignore[assignment]
    world.lose_reports = lambda: None  # type: ignore[method-assign]
    for _ in range(events):
        world.step()
        if world.random.random() < 0.05:
            recorded.remember()
        if world.random.random() < 0.05:
            recorded.die()
    world.finish_all()
    world.core.ledger.check()
    world.ledger.check_events()


def rules() -> Rules:
    return Rules(steps=2, groups_per_batch=1, group_size=2, train_tasks=9, alpha=0)


def filled(path: Path) -> list[Message | None]:
    """A log with a few events of each kind."""
    intake = Intake(BrokerCore(rules()), 100)
    log = WriteAheadLog(path)
    log.begin(intake)
    messages: list[Message | None] = [Published(Version(0, 0)), BatchRequest(0), ServerHello(0, 0, 4), None]
    tickets = []
    for message in messages:
        log.append(1.5, message)
        tickets += [each.ticket for each in intake.take(message, 1.5) if isinstance(each, IssueTicket)]
    messages.append(make_trajectory(tickets[0], 1, 1.0))
    log.append(2.5, messages[-1])
    log.flush()
    return messages


def frames(message: Message | None) -> list[bytes]:
    return [] if message is None else [bytes(frame) for frame in encode(message)]


def test_what_was_appended_is_read_again(tmp_path: Path) -> None:
    messages = filled(tmp_path / "log")
    intake, events = WriteAheadLog(tmp_path / "log").read()
    read = list(events)
    assert isinstance(intake, Intake) and intake.core.timeline == -1
    assert [now for now, _ in read] == [1.5, 1.5, 1.5, 1.5, 2.5]
    assert [frames(message) for _, message in read] == [frames(message) for message in messages]


def test_a_record_that_its_writer_did_not_finish_is_dropped(tmp_path: Path) -> None:
    messages = filled(tmp_path / "log")
    whole = (tmp_path / "log").read_bytes()
    for missing in (1, 17, 200):
        (tmp_path / "log").write_bytes(whole[:-missing])
        _, events = WriteAheadLog(tmp_path / "log").read()
        assert [frames(message) for _, message in events] == [frames(message) for message in messages[:-1]]


def test_damage_is_one_line(tmp_path: Path) -> None:
    filled(tmp_path / "log")
    whole = (tmp_path / "log").read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 50):
        damaged = bytearray(whole)
        damaged[place] ^= 8
        (tmp_path / "log").write_bytes(damaged)
        with pytest.raises(LogDamaged, match=r"log is damaged at byte \d+: resume=CHECKPOINT"):
            list(WriteAheadLog(tmp_path / "log").read()[1])


def test_a_server_that_says_hello_again_gets_what_did_not_arrive() -> None:
    intake = Intake(BrokerCore(rules().changed(redundant_groups=1)), 100)
    intake.take(Published(Version(0, 0)), 0.0)
    issued = [each.ticket for each in intake.take(ServerHello(0, 0, 8), 0.0) if isinstance(each, IssueTicket)]
    assert len(issued) == 4
    arrived = [ticket.ticket_id for ticket in issued[:2]]

    again = intake.take(ServerHello(0, 0, 8, tickets=[*arrived, 999]), 1.0)
    assert again == [IssueTicket(0, issued[2]), IssueTicket(0, issued[3]), RevokeTickets(0, [999])]
    assert intake.take(ServerHello(0, 0, 8, tickets=[ticket.ticket_id for ticket in issued]), 2.0) == []


def test_an_end_is_acknowledged_when_it_is_taken_and_each_time_it_comes_again() -> None:
    intake = Intake(BrokerCore(rules()), 100)
    intake.take(Published(Version(0, 0)), 0.0)
    first, second = [each.ticket for each in intake.take(ServerHello(0, 0, 8), 0.0) if isinstance(each, IssueTicket)]
    late = TicketFailed(0, 0, 2, second.ticket_id, "broken")
    intake.take(late, 1.0)
    assert not intake.acks, "one before it is missing: a broker that dies now must be told again"

    missing = TicketFailed(0, 0, 1, first.ticket_id, "broken")
    intake.take(missing, 2.0)
    assert intake.acks == {(0, 0): [first.ticket_id, second.ticket_id]}
    intake.take(late, 3.0)
    assert intake.acks == {(0, 0): [first.ticket_id, second.ticket_id, second.ticket_id]}
    intake.take(PeerDied("env_server", 0, 0), 4.0)
    assert intake.take(late, 5.0) == []


def test_the_loop_does_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group at a time; what is written meanwhile is in the next one."""
    began: queue.Queue[int] = queue.Queue()
    may_end = threading.Semaphore(0)

    def slow(descriptor: int) -> None:
        began.put(os.fstat(descriptor).st_size)
        may_end.acquire()

    monkeypatch.setattr(write_ahead, "SYNC_S", 0.0)
    monkeypatch.setattr(os, "fdatasync", slow)
    log = WriteAheadLog(tmp_path / "log")
    log.begin(None)
    first = began.get(timeout=60)
    for _ in range(3):
        log.append(1.0, None)
        log.flush()
    assert began.empty()

    may_end.release(2)
    while began.empty():
        log.flush()
    assert began.get() == (tmp_path / "log").stat().st_size > first
    log.remove()


def test_what_the_disk_refuses_is_said_at_the_next_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(write_ahead, "SYNC_S", 0.0)
    monkeypatch.setattr(os, "fdatasync", refuse)
    log = WriteAheadLog(tmp_path / "log")
    log.begin(None)
    deadline = time.monotonic() + 60
    with pytest.raises(OSError, match="Input/output error"):
        while time.monotonic() < deadline:
            log.append(1.0, None)
            log.flush()
    log.remove()

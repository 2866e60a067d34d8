"""The broker goes on from its log as if it had not died, and says when it cannot."""

from __future__ import annotations

import errno
import os
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rl.wire.columns import COLUMNS, Column
from rl.wire.messages import (
    BatchRequest,
    Message,
    PeerDied,
    Published,
    ServerHello,
    Ticket,
    TicketFailed,
    Trajectory,
    Version,
    decode,
    encode,
)
from rollout.broker import BrokerCore, Rules, write_ahead
from rollout.broker.actions import IssueTicket, RevokeTickets
from rollout.broker.intake import Intake
from rollout.broker.write_ahead import LogDamaged, WriteAheadLog
from tests.rollout.broker.test_properties import configurations
from tests.rollout.broker.world import World
from tests.rollout.trajectories import make_trajectory, with_sequence

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


@pytest.fixture
def wide() -> Iterator[Column]:
    """A column of 384 bytes a token, as the routing of 48 layers with 8 experts each is."""
    column = Column("wide", "uint8", shape=(48, 8), covers="context")
    COLUMNS["wide"] = column
    yield column
    del COLUMNS["wide"]


def trajectory(number: int, tokens: int = 400) -> Trajectory:
    made = make_trajectory(Ticket(number, number, 0, 0, Version(0, 0)), number, 1.0, tokens)
    random = np.random.default_rng(number)
    return with_sequence(made, wide=random.integers(0, 256, (tokens + 2, 48, 8), np.uint8))


def received(message: Message) -> Message:
    """As the broker has it: its arrays are views that cannot be written to."""
    return decode([bytes(frame) for frame in encode(message)])


def beside(path: Path) -> list[Path]:
    return sorted(path.parent.glob("log.columns.*"))


def test_large_columns_lie_beside_the_log(tmp_path: Path, wide: Column) -> None:
    """Short samples as well as long ones. The log has as many bytes a token as without the column."""
    with_it = [trajectory(number, tokens) for number, tokens in enumerate((1, 7, 400, 9000))]
    without = [
        replace(each, sequences=[replace(each.sequence, columns=_without(each.sequence.columns, "wide"))])
        for each in with_it
    ]
    sizes = []
    for name, sent in (("with", with_it), ("without", without)):
        (tmp_path / name).mkdir()
        log = WriteAheadLog(tmp_path / name / "log")
        log.begin([received(each) for each in sent])
        for each in sent:
            log.append(1.0, received(each))
        log.flush()
        state, events = WriteAheadLog(tmp_path / name / "log").read()
        assert [frames(each) for each in state] == [frames(each) for each in sent]
        assert [frames(message) for _, message in events] == [frames(each) for each in sent]
        sizes.append((tmp_path / name / "log").stat().st_size)

    tokens = 2 * sum(len(each.sequence.token_ids) for each in with_it)
    print(
        f"{sizes[0] / tokens:.1f} bytes a token in the log with 384 bytes of columns, {sizes[1] / tokens:.1f} without"
    )
    assert sizes[0] < 1.02 * sizes[1] + 1000
    assert (tmp_path / "with" / "log.columns.1").stat().st_size >= 384 * tokens


def _without(columns: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {each: values for each, values in columns.items() if each != name}


def test_what_is_torn_beside_the_log_is_torn_in_it(tmp_path: Path, wide: Column) -> None:
    """The last record is dropped if it has not all of its columns; behind it nothing may follow."""
    path = tmp_path / "log"
    log = WriteAheadLog(path)
    log.begin(None)
    sent = [trajectory(number) for number in range(3)]
    for each in sent:
        log.append(1.0, each)
    log.flush()
    (large,) = beside(path)
    whole = large.read_bytes()
    assert len(list(WriteAheadLog(path).read()[1])) == 3

    for missing in (1, 100_000):
        large.write_bytes(whole[:-missing])
        _, events = WriteAheadLog(path).read()
        assert [frames(message) for _, message in events] == [frames(each) for each in sent[:2]]
    large.unlink()
    with pytest.raises(LogDamaged, match=r"log.columns.1 is damaged at byte 0: resume=CHECKPOINT"):
        list(WriteAheadLog(path).read()[1])

    large.write_bytes(whole)
    log.append(2.0, None)
    log.flush()
    large.write_bytes(whole[:-1])
    with pytest.raises(LogDamaged, match=r"log.columns.1 is damaged at byte \d+"):
        list(WriteAheadLog(path).read()[1])


def test_damage_beside_the_log_is_one_line(tmp_path: Path, wide: Column) -> None:
    path = tmp_path / "log"
    log = WriteAheadLog(path)
    log.begin([received(trajectory(0))])
    log.append(1.0, trajectory(1))
    log.flush()
    (large,) = beside(path)
    whole = large.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 20):
        damaged = bytearray(whole)
        damaged[place] ^= 8
        large.write_bytes(damaged)
        with pytest.raises(LogDamaged, match=r"log.columns.1 is damaged at byte \d+: resume=CHECKPOINT"):
            list(WriteAheadLog(path).read()[1])


def test_a_log_that_begins_anew_takes_the_columns_with_it(
    tmp_path: Path, wide: Column, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    log = WriteAheadLog(path)
    log.begin(None)
    assert not log.is_long
    monkeypatch.setattr(write_ahead, "_LONG_BYTES_BESIDE", 1000)
    log.begin(None)
    log.append(1.0, trajectory(0))
    log.flush()
    assert log.is_long, "what lies beside it counts"

    state, events = WriteAheadLog(path).read()
    (event,) = events
    successor = WriteAheadLog(path)
    successor.begin([event[1]])
    assert [file.name for file in beside(path)] == ["log.columns.3"]
    (kept,), none = WriteAheadLog(path).read()
    assert state is None and not list(none) and frames(kept) == frames(trajectory(0))

    # A process that died as it began the next one leaves a file that nothing names.
    (tmp_path / "log.columns.4").write_bytes(b"of nobody")
    (kept,), _ = WriteAheadLog(path).read()
    assert frames(kept) == frames(trajectory(0))
    successor.begin([kept])
    assert [file.name for file in beside(path)] == ["log.columns.5"]
    successor.remove()
    assert not list(tmp_path.iterdir())


def test_what_a_plug_in_writes_to_stays_in_the_log(tmp_path: Path) -> None:
    """Arrays of its own can be written to again when they are read."""
    log = WriteAheadLog(tmp_path / "log")
    log.begin(np.zeros(1 << 16))
    state, _ = WriteAheadLog(tmp_path / "log").read()
    state += 1
    assert state.sum() == 1 << 16 and beside(tmp_path / "log")[0].stat().st_size == 0


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

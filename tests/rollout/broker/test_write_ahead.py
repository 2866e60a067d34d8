"""The broker goes on from its log as if it had not died, and says when it cannot."""

from __future__ import annotations

import ast
import errno
import os
import pickle
import queue
import random
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

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
    decode_all,
    encode,
    encode_all,
)
from rollout.broker import write_ahead
from rollout.broker.actions import IssueTicket, RevokeTickets
from rollout.broker.core import BrokerCore
from rollout.broker.hooks import BrokerHook, Proposals
from rollout.broker.intake import Intake
from rollout.broker.kept import CannotKeep, Kept, keep, restore
from rollout.broker.records import Attempt
from rollout.broker.rules import Rules
from rollout.broker.write_ahead import LogDamaged, WriteAheadLog
from tests.rollout.broker.test_properties import configurations
from tests.rollout.broker.world import World
from tests.rollout.trajectories import make_trajectory, with_sequence

EVENTS = {
    *("published", "batch_requested", "eval_requested", "server_joined", "server_left", "finished", "failed"),
    *("refused", "cancelled", "first_token", "usage", "tick"),
}


KEY = bytes(range(32))


def log_at(path: Path) -> WriteAheadLog:
    return WriteAheadLog(path, KEY)


def through_msgpack(kept: Kept) -> Kept:
    """As the log gives it back."""
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(kept.state))
    return Kept(state, decode_all(encode_all(kept.messages)) if kept.messages else [])


def of(*messages: Message) -> Kept:
    return Kept(None, list(messages))


class Recorded:
    """A core whose process dies now and then: its state of some time ago, and the events since, give the same core."""

    def __init__(self, core: BrokerCore, rules: Rules) -> None:
        self._core = core
        self._rules = rules
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
        self._kept = through_msgpack(keep(Intake(self._core, 100)))
        self._events: list[tuple[str, Any]] = []
        again = through_msgpack(keep(Intake(self._restored(), 100)))
        assert again.state == self._kept.state, "something was not kept"

    def _restored(self) -> BrokerCore:
        core = BrokerCore(self._rules, ledger=type(self._core.ledger)())
        restore(Intake(core, 100), self._kept)
        return core

    def die(self) -> None:
        successor = self._restored()
        for name, arguments in self._events:
            getattr(successor, name)(*arguments)
        assert successor.describe() == self._core.describe()
        assert successor.snapshot() == self._core.snapshot()
        self._core = successor


@settings(max_examples=40)
@given(config=configurations(), seed=st.integers(0, 2**32), events=st.integers(0, 200))
def test_any_events_since_any_state_lead_to_the_same_core(config: Rules, seed: int, events: int) -> None:
    world = World(config, seed)
    world.core = recorded = Recorded(world.core, config)  # type: ignore[assignment]
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
    log = log_at(path)
    log.begin(keep(intake))
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
    kept, events = log_at(tmp_path / "log").read()
    read = list(events)
    restore(Intake(BrokerCore(rules()), 100), kept)
    assert [now for now, _ in read] == [1.5, 1.5, 1.5, 1.5, 2.5]
    assert [frames(message) for _, message in read] == [frames(message) for message in messages]


def unfinished(path: Path) -> None:
    """As if its writer had died over the last record: it does not count yet."""
    data = path.read_bytes()
    salt = data[len(write_ahead._FORMAT) : write_ahead._COUNT_AT]
    (count, _) = write_ahead._COUNT.unpack(data[write_ahead._COUNT_AT : write_ahead._BEGIN])
    tag = write_ahead._Seal(KEY, salt).tag(b"", count - 1, write_ahead._ALL)
    before = write_ahead._COUNT.pack(count - 1, tag)
    path.write_bytes(data[: write_ahead._COUNT_AT] + before + data[write_ahead._BEGIN :])


def test_a_log_that_was_cut_is_damaged_wherever_it_was_cut(tmp_path: Path) -> None:
    """Between two records as within one: what is lost had been acknowledged, and nobody sends it again."""
    path = tmp_path / "log"
    filled(path)
    before, found = records(path)
    ends = [len(before) + sum(map(len, found[:count])) for count in range(1, len(found))]
    whole = path.read_bytes()
    for end in [*ends, *(end + 1 for end in ends), len(whole) - 1]:
        path.write_bytes(whole[:end])
        with pytest.raises(LogDamaged, match=rf"log is damaged at byte {end}: resume=CHECKPOINT"):
            list(log_at(path).read()[1])


def test_a_record_that_its_writer_did_not_finish_is_dropped(tmp_path: Path) -> None:
    messages = filled(tmp_path / "log")
    unfinished(tmp_path / "log")
    whole = (tmp_path / "log").read_bytes()
    for missing in (1, 17, 200):
        (tmp_path / "log").write_bytes(whole[:-missing])
        _, events = log_at(tmp_path / "log").read()
        assert [frames(message) for _, message in events] == [frames(message) for message in messages[:-1]]


def test_damage_is_one_line(tmp_path: Path) -> None:
    filled(tmp_path / "log")
    whole = (tmp_path / "log").read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 50):
        damaged = bytearray(whole)
        damaged[place] ^= 8
        (tmp_path / "log").write_bytes(damaged)
        with pytest.raises(LogDamaged, match=r"log is damaged.*: resume=CHECKPOINT"):
            list(log_at(tmp_path / "log").read()[1])


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
        log = log_at(tmp_path / name / "log")
        log.begin(of(*map(received, sent)))
        for each in sent:
            log.append(1.0, received(each))
        log.flush()
        state, events = log_at(tmp_path / name / "log").read()
        assert [frames(each) for each in state.messages] == [frames(each) for each in sent]
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
    log = log_at(path)
    log.begin(of())
    sent = [trajectory(number) for number in range(3)]
    for each in sent:
        log.append(1.0, each)
    log.flush()
    (large,) = beside(path)
    whole = large.read_bytes()
    assert len(list(log_at(path).read()[1])) == 3

    unfinished(path)
    for missing in (1, 100_000):
        large.write_bytes(whole[:-missing])
        _, events = log_at(path).read()
        assert [frames(message) for _, message in events] == [frames(each) for each in sent[:2]]
    large.unlink()
    with pytest.raises(LogDamaged, match=r"log.columns.1 is damaged at byte 0: resume=CHECKPOINT"):
        list(log_at(path).read()[1])

    large.write_bytes(whole)
    log.append(2.0, None)
    log.flush()
    large.write_bytes(whole[:-1])
    with pytest.raises(LogDamaged, match=r"log.columns.1 is damaged at byte \d+"):
        list(log_at(path).read()[1])


def test_damage_beside_the_log_is_one_line(tmp_path: Path, wide: Column) -> None:
    path = tmp_path / "log"
    log = log_at(path)
    log.begin(of(received(trajectory(0))))
    log.append(1.0, trajectory(1))
    log.flush()
    (large,) = beside(path)
    whole = large.read_bytes()
    for place in np.random.default_rng(0).integers(0, len(whole), 20):
        damaged = bytearray(whole)
        damaged[place] ^= 8
        large.write_bytes(damaged)
        with pytest.raises(LogDamaged, match=r"log.columns.1 is damaged at byte \d+: resume=CHECKPOINT"):
            list(log_at(path).read()[1])


@pytest.mark.parametrize("kept", [0, 100_000])
def test_the_larger_its_state_the_rarer_a_log_begins_anew(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run without checkpoints the state grows with every step: written at each so many events, it would stop the
    broker for longer and longer."""
    monkeypatch.setattr(write_ahead, "_LONG_EVENTS", 10)
    log = log_at(tmp_path / "log")
    log.begin(Kept(bytes(kept), []))
    events = 0
    while not log.is_long:
        log.append(float(events), None)
        log.flush()
        events += 1
    assert 10 + kept // 100 < events < 30 + kept // 100


def test_a_log_begins_anew_as_often_whatever_stood_in_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would be longer than the one before, and a successor would read for longer and longer."""
    monkeypatch.setattr(write_ahead, "_LONG_EVENTS", 100)
    log = log_at(tmp_path / "log")
    lengths = []
    for _ in range(3):
        log.begin(Kept(bytes(10), []))
        events = 0
        while not log.is_long:
            log.append(float(events), ServerHello(0, 0, 1))
            log.flush()
            events += 1
        lengths.append(events)
    assert lengths == lengths[:1] * 3


def test_a_log_that_begins_anew_takes_the_columns_with_it(
    tmp_path: Path, wide: Column, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    log = log_at(path)
    log.begin(of())
    assert not log.is_long
    monkeypatch.setattr(write_ahead, "_LONG_BYTES_BESIDE", 1000)
    log.begin(of())
    log.append(1.0, trajectory(0))
    log.flush()
    assert log.is_long, "what lies beside it counts"

    state, events = log_at(path).read()
    (event,) = events
    successor = log_at(path)
    successor.begin(of(trajectory(0)))
    assert [file.name for file in beside(path)] == ["log.columns.3"]
    kept, none = log_at(path).read()
    assert state == of() and not list(none) and frames(*kept.messages) == frames(trajectory(0))
    assert event[1] is not None and frames(event[1]) == frames(trajectory(0))

    # A process that died as it began the next one leaves a file that nothing names.
    (tmp_path / "log.columns.4").write_bytes(b"of nobody")
    kept, _ = log_at(path).read()
    assert frames(*kept.messages) == frames(trajectory(0))
    successor.begin(kept)
    assert [file.name for file in beside(path)] == ["log.columns.5"]
    successor.remove()
    assert not list(tmp_path.iterdir())


def test_only_the_owner_reads_the_log(tmp_path: Path, wide: Column) -> None:
    for name in ("log", "log.columns.1"):
        (tmp_path / name).write_bytes(b"of others")  # who made it first does not keep it open
        (tmp_path / name).chmod(0o666)
    log = log_at(tmp_path / "log")
    log.begin(of(trajectory(0)))
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    assert modes == {"log": 0o600, "log.columns.2": 0o600}


class Runs:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self._path,)


def old_log(path: Path) -> None:
    """As an earlier version wrote it: length, xxh3 and xxh3 of both, and the pickled state."""
    content = msgspec.msgpack.encode((1, pickle.dumps(Runs(path.with_name("made"))), None))
    head = struct.pack("<QQ", len(content), xxh3_64_intdigest(content))
    path.write_bytes(head + struct.pack("<Q", xxh3_64_intdigest(head)) + content)


@pytest.mark.parametrize("what", ["an earlier version's", "empty", "another run's", "forged"])
def test_a_log_that_this_run_did_not_write_is_one_line_and_runs_nothing(tmp_path: Path, what: str) -> None:
    path = tmp_path / "log"
    if what == "an earlier version's":
        old_log(path)
    elif what == "empty":
        path.touch()
    else:
        filled(path)
    log = WriteAheadLog(path, bytes(32) if what == "another run's" else KEY)
    if what == "forged":  # every checksum that needs no key is right
        whole = bytearray(path.read_bytes())
        reward = whole.rindex(struct.pack(">d", 1.0))
        whole[reward : reward + 8] = struct.pack(">d", 9.0)
        path.write_bytes(whole)

    with pytest.raises(LogDamaged, match=r"log is damaged.*: resume=CHECKPOINT begins without it") as error:
        list(log.read()[1])
    assert "\n" not in str(error.value) and not (tmp_path / "made").exists()


def records(path: Path) -> tuple[bytes, list[bytes]]:
    """What stands before the records, and each of them, head included."""
    data = path.read_bytes()
    start = write_ahead._BEGIN
    before = data[:start]
    found = []
    while start < len(data):
        size = 8 + 16 + 8 + int.from_bytes(data[start : start + 8], "little")
        found.append(data[start : start + size])
        start += size
    return before, found


@pytest.mark.parametrize("how", ["left out", "twice", "moved", "of the log before"])
def test_whole_records_stand_where_they_were_written(tmp_path: Path, how: str) -> None:
    path = tmp_path / "log"
    filled(path)
    _, (_, _, earlier, *_) = records(path)
    filled(path)
    before, (state, first, second, third, *rest) = records(path)
    changed = {
        "left out": [state, first, third],
        "twice": [state, first, first, second, third],
        "moved": [state, second, first, third],
        "of the log before": [state, first, earlier, third],
    }[how]
    path.write_bytes(before + b"".join([*changed, *rest]))
    with pytest.raises(LogDamaged, match="log is damaged at byte"):
        list(log_at(path).read()[1])


class Counting(BrokerHook):
    """Keeps what it likes, without a word on how."""

    def __init__(self, options: Any, groups: Any) -> None:
        super().__init__(options, groups)
        self.slow: deque[Attempt] = deque(maxlen=3)
        self.of_server: defaultdict[int, list[float]] = defaultdict(list)

    def issued(self, now: float, attempt: Attempt) -> Proposals:
        self.slow.append(attempt)
        self.of_server[attempt.server].append(now)
        return ()


class Drawing(BrokerHook):
    """Keeps what only it knows how to keep."""

    def __init__(self, options: Any, groups: Any) -> None:
        super().__init__(options, groups)
        self.random = random.Random(7)

    def issued(self, now: float, attempt: Attempt) -> Proposals:
        self.random.random()
        return ()


class KeptDrawing(Drawing):
    def state(self) -> Any:
        return repr(self.random.getstate())

    def restore(self, state: Any) -> None:
        self.random.setstate(ast.literal_eval(state))


def test_hooks_go_on_with_what_they_keep() -> None:
    me = __name__
    with_hooks = rules().changed(hooks=[f"{me}:Counting", f"{me}:KeptDrawing"])
    intake = Intake(BrokerCore(with_hooks), 100)
    for message in (Published(Version(0, 0)), ServerHello(0, 0, 4)):
        intake.take(message, 1.5)

    other = Intake(BrokerCore(with_hooks), 100)
    restore(other, through_msgpack(keep(intake)))
    counting, drawing = other.core.hooks
    assert isinstance(counting, Counting) and isinstance(drawing, KeptDrawing)
    assert list(counting.slow) == list(other.core.ledger.attempts.values()) and counting.slow.maxlen == 3
    assert counting.of_server == {0: [1.5, 1.5]} and counting.of_server[9] == []
    before = intake.core.hooks[1]
    assert isinstance(before, KeptDrawing) and drawing.random.random() == before.random.random()

    with pytest.raises(CannotKeep, match=r"Drawing holds a Random: give it state\(\) and restore\(state\)"):
        keep(Intake(BrokerCore(rules().changed(hooks=[f"{me}:Drawing"])), 100))


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
    log = log_at(tmp_path / "log")
    log.begin(of())
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
    log = log_at(tmp_path / "log")
    log.begin(of())
    deadline = time.monotonic() + 60
    with pytest.raises(OSError, match="Input/output error"):
        while time.monotonic() < deadline:
            log.append(1.0, None)
            log.flush()
    log.remove()

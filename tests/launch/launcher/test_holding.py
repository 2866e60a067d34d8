"""An agent that is to hold what stands in the head's folder: one whole checkpoint, whatever comes between."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launch.agent import Agent
from launch.launcher import folders
from launch.launcher.folders import Fetcher, Opened, made_in
from launch.launcher.node_messages import CHUNK_BYTES, TAIL_BYTES, Ask, Begin, Part, Sent
from rl.store.checkpoint_folder import Meta, begin, commit, steps_of, verify
from tests.conftest import MakeRun

FINISH_S = 60.0


class Holder:
    """An agent without a connection; what it asks for is answered at once, from the head's folder."""

    def __init__(self, make_run: MakeRun, head: Path) -> None:
        self.head = head
        self.run = make_run()
        self.asked: list[Ask] = []
        self.agent = Agent.__new__(Agent)
        known: dict[str, Any] = {
            "_run": self.run,
            "_fetcher": Fetcher(self.run.folder, FINISH_S),
            "_copy": None,
            "_begun": None,
        }
        known |= {"_waiting": {}, "_handles": {}, "_states": {}, "_send": self.asked.append, "_lease": object()}
        known |= {"_is_shared": False, "_folder": self.run.folder}
        known["_files"] = SimpleNamespace(take=lambda _: None, ask=lambda _: None)
        for name, value in known.items():
            setattr(self.agent, name, value)

    def opened(self, step: int, journal: bytes = b"journal") -> Opened:
        begin(self.head, step)
        commit(self.head, Meta(step, 0, 1), journal, keep=9)
        return Opened(self.head.parent, f"checkpoints/step-{step}")

    def hears(self, opened: Opened) -> None:
        self.agent._from_head(Sent(opened.name, opened.files), b"")

    def gets(self, opened: Opened, spoil: bool = False) -> None:
        """All that it asks for, until it asks for nothing more and has looked at what came."""
        while self.asked or self.agent._fetcher.is_busy:
            for ask in [*self.asked]:
                self.asked.remove(ask)
                part = opened.part(ask)
                self.agent._from_head(Part(part.file, part.offset, b"x" * len(part.data) if spoil else part.data), b"")
            self.agent._look()

    def left(self) -> list[str]:
        """What lies in its folder of checkpoints, once the agent has ended."""
        self.agent._fetcher.close()
        return [path.name for path in self.run.folder.glob("checkpoints/*")]

    @property
    def steps(self) -> list[int]:
        return [*steps_of(self.run.folder / "checkpoints")]


@pytest.fixture
def holder(make_run: MakeRun, tmp_path: Path) -> Holder:
    return Holder(make_run, tmp_path / "head" / "checkpoints")


def test_the_newest_one_is_held_and_the_one_before_until_then(holder: Holder) -> None:
    for step in (4, 8):
        opened = holder.opened(step)
        holder.hears(opened)
        assert holder.steps == ([4] if step == 8 else []), "half of it takes nothing's place"
        holder.gets(opened)
        assert holder.steps == [step]
        holder.hears(opened)
        assert not holder.asked, "it is there"
    assert verify(holder.run.folder / "checkpoints" / "step-8").step == 8

    Fetcher(holder.head.parent, FINISH_S).forget_others("")
    earlier = holder.opened(4, journal=b"after an undo")
    holder.hears(earlier)
    holder.gets(earlier)
    assert holder.steps == [4]


def test_a_damaged_one_is_fetched_again_and_another_takes_the_place_of_half_a_one(holder: Holder) -> None:
    opened = holder.opened(4)
    holder.hears(opened)
    holder.gets(opened, spoil=True)
    assert holder.steps == []
    holder.hears(opened)
    while not holder.asked:  # there is room once the damaged one is gone
        holder.agent._look()

    holder.asked.clear()
    other = holder.opened(8)  # of a head that has begun meanwhile, and has the first no more
    holder.hears(other)
    holder.gets(other)
    assert holder.left() == ["step-8"]


def full_disk(*_: object) -> bool:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_ends_the_copy_alone_and_the_next_one_is_tried(
    holder: Holder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = holder.opened(4)
    with monkeypatch.context() as full:
        full.setattr(Fetcher, "take", full_disk)
        holder.hears(opened)
        holder.agent._from_head(opened.part(holder.asked.pop(0)), b"")
    assert "checkpoints/step-4 cannot be held" in capsys.readouterr().err
    assert not holder.agent._fetcher.is_busy

    holder.asked.clear()
    holder.hears(opened)
    assert not holder.asked, "it would not fit now either"
    other = holder.opened(8)
    holder.hears(other)
    holder.gets(other)
    assert holder.left() == ["step-8"]


def test_what_ranks_begin_from_goes_before_a_copy(holder: Holder) -> None:
    copy, counts = holder.opened(4), holder.opened(8)
    holder.hears(copy)
    holder.asked.clear()
    holder.agent._begin_from(Begin(1000, counts.name, counts.digest, counts.files, b"a line\n"))
    holder.hears(holder.opened(12))
    holder.gets(counts)
    assert holder.steps == [8] and made_in(holder.run.folder) == {counts.name: counts.digest}
    assert (holder.run.folder / "changes.jsonl").read_bytes() == b"a line\n"


def test_what_ranks_begin_from_is_fetched_again_where_it_was_damaged_and_that_is_told(
    holder: Holder, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = holder.opened(8)
    holder.agent._begin_from(Begin(1000, counts.name, counts.digest, counts.files, b""))
    holder.agent._look()
    first, *_ = holder.asked
    whole = counts.part(first)
    holder.asked.remove(first)
    holder.agent._from_head(Part(whole.file, whole.offset, b"x" * len(whole.data)), b"")
    holder.gets(counts)
    assert capsys.readouterr().err == "! checkpoints/step-8 was damaged on its way, and is fetched again\n"
    assert verify(holder.run.folder / "checkpoints" / "step-8").step == 8


def test_ranks_that_die_while_what_they_begin_from_is_fetched_go_on_with_what_has_come(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    part_of = Opened.part
    counts = holder.opened(8, journal=b"x" * (9 * CHUNK_BYTES))
    holder.agent._begin_from(Begin(1000, counts.name, counts.digest, counts.files, b""))
    holder.agent._look()
    come = [holder.asked.pop(0) for _ in range(3)]
    for ask in come:
        holder.agent._from_head(counts.part(ask), b"")

    again = Opened(holder.head.parent, counts.name)  # as the head opens it for each of their incarnations
    parts = sum(-(-file.size // CHUNK_BYTES) for file in again.files.values())
    served: list[Ask] = []

    def part(opened: Opened, ask: Ask) -> Part:
        served.append(ask)
        return part_of(opened, ask)

    monkeypatch.setattr(Opened, "part", part)
    holder.agent._begin_from(Begin(2000, again.name, again.digest, again.files, b""))
    holder.gets(again)
    assert holder.agent._run.timeline == 2000 and verify(holder.run.folder / "checkpoints" / "step-8").step == 8
    assert len(served) == parts - len(come) and not set(come) & set(served)


def test_what_was_trained_again_is_fetched_from_its_first_part(holder: Holder) -> None:
    counts = holder.opened(8, journal=b"x" * (9 * CHUNK_BYTES))
    holder.agent._begin_from(Begin(1000, counts.name, counts.digest, counts.files, b""))
    holder.agent._look()
    holder.agent._from_head(counts.part(holder.asked.pop(0)), b"")
    holder.asked.clear()

    Fetcher(holder.head.parent, FINISH_S).forget_others("")
    other = holder.opened(8, journal=b"trained again")
    holder.agent._begin_from(Begin(2000, other.name, other.digest, other.files, b""))
    holder.gets(other)
    assert made_in(holder.run.folder) == {other.name: other.digest}


def test_ranks_that_begin_elsewhere_do_not_wait_for_what_is_written_to_the_disk(
    holder: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent renews its lease, and a checkpoint may take minutes."""
    may_go_on = threading.Event()
    monkeypatch.setattr(folders, "damage", lambda *_: may_go_on.wait(60) and None)
    copy, counts = holder.opened(4), holder.opened(8)
    holder.hears(copy)
    while not holder.agent._fetcher.is_finishing:
        part = copy.part(holder.asked.pop(0))
        holder.agent._from_head(part, b"")
    holder.agent._look()

    holder.agent._begin_from(Begin(1000, counts.name, counts.digest, counts.files, b""))
    assert not may_go_on.is_set() and holder.steps == []
    may_go_on.set()
    holder.gets(counts)
    assert holder.left() == ["step-8"]


def test_many_long_logs_come_one_after_the_other(holder: Holder) -> None:
    """As after a time in which the head's disk was full. A beat that is too long is none: the machine is lost."""
    names = [f"env_server.{number}.0" for number in range(100)]
    (holder.run.folder / "logs").mkdir(exist_ok=True)
    for name in names:
        (holder.run.folder / "logs" / f"{name}.log").write_bytes(bytes(2 * TAIL_BYTES))
    holder.agent._states = dict.fromkeys(names)
    holder.agent._held = {}
    while found := holder.agent._logs():
        assert sum(len(data) for _, data in found.values()) <= CHUNK_BYTES
        holder.agent._held |= {name: begin + len(data) for name, (begin, data) in found.items()}
    assert holder.agent._held == dict.fromkeys(names, 2 * TAIL_BYTES)

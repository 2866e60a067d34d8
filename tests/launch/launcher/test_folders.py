"""Folders that travel part by part: a half one never has its name, and a damaged one is fetched again."""

from __future__ import annotations

import errno
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.launcher import folders
from launch.launcher.folders import Fetcher, Opened, made_in
from launch.launcher.node_messages import Ask, File, Part
from rl.store.checkpoint_folder import Meta, begin, commit, latest, read_journal, verify
from rl.store.digests import DIGESTS
from rl.wire.codec import ProtocolError

NAME = "checkpoints/step-4"
FINISH_S = 60.0


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """The folder of a run with a checkpoint of several parts."""
    folder = tmp_path / "there" / "checkpoints"
    state = begin(folder, 4) / "state"
    state.mkdir()
    (state / "__0_0.distcp").write_bytes(bytes(range(256)) * 12_000)  # three parts
    (state / "empty").write_bytes(b"")
    commit(folder, Meta(4, 0, 1), b"journal", keep=2)
    return tmp_path / "there"


class Slow:
    """A function that does not go on before it may."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.began, self.may_go_on = threading.Event(), threading.Event()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.began.set()
        assert self.may_go_on.wait(60)
        return self._function(*arguments, **named)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str], Slow]]:
    made: list[Slow] = []

    def make(module: Any, name: str) -> Slow:
        made.append(Slow(getattr(module, name)))
        monkeypatch.setattr(module, name, made[-1])
        return made[-1]

    yield make
    for each in made:
        each.may_go_on.set()


def fetch(fetcher: Fetcher, opened: Opened, spoil: bool = False) -> bool:
    while (ended := fetcher.ended()) is None:
        for ask in fetcher.asks(time.monotonic()):
            part = opened.part(ask)
            data = b"x" * len(part.data) if spoil and ask.file.endswith("distcp") else part.data
            assert fetcher.take(Part(part.file, part.offset, data), time.monotonic())
    return ended


def test_a_checkpoint_arrives_whole_with_its_journal(made: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    opened = Opened(made, NAME)
    fetcher = Fetcher(here, FINISH_S)
    fetcher.begin(NAME, opened.files)
    for _ in range(2):
        for ask in fetcher.asks(0.0):
            fetcher.take(opened.part(ask), 0.0)
        assert latest(here / "checkpoints") is None, "half of it does not count"

    assert fetch(fetcher, opened) and not fetcher.is_busy
    found = latest(here / "checkpoints")
    assert found is not None and verify(found) == Meta(4, 0, 1) and read_journal(found) == b"journal"
    assert made_in(here) == made_in(made)


def test_what_was_changed_on_its_way_gets_no_name_and_can_be_fetched_again(made: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    opened = Opened(made, NAME)
    fetcher = Fetcher(here, FINISH_S)
    fetcher.begin(NAME, opened.files)
    assert not fetch(fetcher, opened, spoil=True)
    assert made_in(here) == {}
    fetcher.begin(NAME, opened.files)
    assert fetch(fetcher, opened) and made_in(here) == made_in(made)
    fetcher.close()
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step-4"]


def test_what_never_comes_whole_is_no_progress_in_the_end(made: Path, tmp_path: Path) -> None:
    """A file that was changed since its digest was written comes as often as it is asked for: whoever waits for it
    would wait for ever."""
    opened = Opened(made, NAME)
    fetcher = Fetcher(tmp_path / "here", FINISH_S)
    for number in range(2 * folders.TRIES):
        fetcher.begin(NAME, opened.files)
        before = fetcher.came(0.0)
        came = set()
        while fetcher.ended() is None:
            came.add(fetcher.came(time.monotonic()))
            for ask in fetcher.asks(time.monotonic()):
                assert fetcher.take(Part(ask.file, ask.offset, b"x"), time.monotonic())
        assert (came - {before} != set()) == (number < folders.TRIES)
    fetcher.close()


def fetch_as_far_as(fetcher: Fetcher, opened: Opened, parts: int) -> list[bool]:
    """Of each part whether it was progress."""
    told: list[bool] = []
    fetcher.begin(NAME, opened.files)
    while len(told) < parts:
        for ask in fetcher.asks(0.0)[: parts - len(told)]:
            before = fetcher.came(0.0)
            fetcher.take(opened.part(ask), 0.0)
            told.append(fetcher.came(0.0) != before)
    return told


def test_a_folder_that_was_not_wanted_for_a_while_is_progress_as_often_as_it_is_fetched(
    made: Path, tmp_path: Path
) -> None:
    """Ranks that die again and again each begin the copy of a checkpoint anew, of which theirs may be the only one."""
    opened = Opened(made, NAME)
    fetcher = Fetcher(tmp_path / "here", FINISH_S)
    for _ in range(2 * folders.TRIES):
        assert all(fetch_as_far_as(fetcher, opened, 2))
        fetcher.cancel()
    fetcher.close()


def test_a_folder_for_which_there_was_no_room_is_progress_once_there_is(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opened(made, NAME)
    fetcher = Fetcher(tmp_path / "here", FINISH_S)
    write = folders.Arriving.write

    def write_until_full(arriving: folders.Arriving, part: Part) -> None:
        if part.offset:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(arriving, part)

    came = fetcher.came(0.0)
    with monkeypatch.context() as patch:
        patch.setattr(folders.Arriving, "write", write_until_full)
        for _ in range(2 * folders.TRIES):
            came = fetcher.came(0.0)
            with pytest.raises(OSError):
                fetch_as_far_as(fetcher, opened, len(opened.files) + 2)
            fetcher.cancel()
        assert fetcher.came(0.0) == came, "a disk that stays full is no progress"

    told = fetch_as_far_as(fetcher, opened, len(opened.files) + 2)
    assert told[-2:] == [True, True]
    arrived = fetcher.came(1.0)
    assert fetcher.is_finishing and fetcher.came(2.0) > arrived
    assert fetch(fetcher, opened)
    fetcher.close()


def test_a_folder_is_sent_to_the_end_when_it_was_removed_meanwhile(made: Path, tmp_path: Path) -> None:
    known = made_in(made)
    opened = Opened(made, NAME)
    Fetcher(made, FINISH_S).forget_others("")
    assert made_in(made) == {}
    with pytest.raises(OSError):
        Opened(made, NAME)
    fetcher = Fetcher(tmp_path / "here", FINISH_S)
    fetcher.begin(NAME, opened.files)
    assert fetch(fetcher, opened) and made_in(tmp_path / "here") == known


def test_a_folder_replaces_an_earlier_one_of_its_name_and_one_that_is_cancelled_leaves_nothing(
    made: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    begin(here / "checkpoints", 4)
    commit(here / "checkpoints", Meta(4, 7, 1), b"of another timeline", keep=2)
    opened = Opened(made, NAME)
    fetcher = Fetcher(here, FINISH_S)
    fetcher.begin(NAME, opened.files)
    fetcher.take(opened.part(fetcher.asks(0.0)[0]), 0.0)
    fetcher.cancel()
    assert [*made_in(here)] == [NAME] and made_in(here) != made_in(made)

    fetcher.begin(NAME, opened.files)
    assert fetch(fetcher, opened) and made_in(here) == made_in(made)
    fetcher.close()
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step-4"]


def test_it_goes_on_as_long_as_parts_come_and_then_for_as_long_as_the_disk_may_take(made: Path, tmp_path: Path) -> None:
    opened = Opened(made, NAME)
    fetcher = Fetcher(tmp_path / "here", FINISH_S)
    fetcher.begin(NAME, opened.files)
    now, came = 100.0, [fetcher.came(100.0)]
    while not fetcher.is_finishing:
        assert fetcher.came(now + 1) == came[-1], "nothing comes"
        for ask in fetcher.asks(now):
            now += 1
            assert fetcher.take(opened.part(ask), now)
            came.append(fetcher.came(now))

    came += [fetcher.came(now + after) for after in (1, 2, FINISH_S)]
    assert len(set(came)) == len(came)
    assert fetcher.came(now + FINISH_S + 1) == came[-1]
    fetcher.close()


@pytest.mark.parametrize("step", ["damage", "sync_folder"])
def test_one_that_is_cancelled_while_it_is_compared_or_written_to_the_disk_never_gets_its_name(
    made: Path, tmp_path: Path, slow: Callable[[Any, str], Slow], step: str
) -> None:
    """Whoever cancels keeps leases alive, and does not wait for it: it may have hundreds of gigabytes."""
    here = tmp_path / "here"
    opened = Opened(made, NAME)
    fetcher = Fetcher(here, FINISH_S)
    fetcher.begin(NAME, opened.files)
    finishing = slow(folders, step)
    while not finishing.began.wait(0.01):
        for ask in fetcher.asks(0.0):
            fetcher.take(opened.part(ask), 0.0)
        assert fetcher.ended() is None

    fetcher.cancel()
    assert not fetcher.is_busy
    fetcher.begin(NAME, opened.files)  # another one of this name does not get into its way
    fetcher.cancel()
    finishing.may_go_on.set()
    fetcher.close()
    assert not any((here / "checkpoints").iterdir())


def test_what_is_dropped_has_no_name_at_once_and_nothing_is_fetched_before_its_room_is_free(
    made: Path, tmp_path: Path, slow: Callable[[Any, str], Slow]
) -> None:
    opened = Opened(made, NAME)
    freeing = slow(shutil, "rmtree")
    fetcher = Fetcher(made, FINISH_S)
    fetcher.drop_checkpoints([NAME])
    assert made_in(made) == {}
    fetcher.begin(NAME, opened.files)
    assert not fetcher.asks(0.0)
    freeing.may_go_on.set()
    assert fetch(fetcher, opened)
    fetcher.close()
    assert [path.name for path in (made / "checkpoints").iterdir()] == ["step-4"]


def test_what_a_killed_process_was_about_to_drop_or_to_fetch_is_gone_with_the_next_one(made: Path) -> None:
    for left in ("step-2.x.dropped", "step-3.x.arriving"):
        (made / "checkpoints" / left / "state").mkdir(parents=True)
    opened = Opened(made, NAME)
    fetcher = Fetcher(made, FINISH_S)
    fetcher.begin(NAME, opened.files)
    fetcher.close()
    assert [path.name for path in (made / "checkpoints").iterdir()] == ["step-4"]


def test_nothing_but_the_files_of_the_folder_is_written_or_read(made: Path, tmp_path: Path) -> None:
    opened = Opened(made, NAME)
    for ask in (Ask("run.json", 0), Ask(f"{NAME}/../../run.json", 0), Ask(f"{NAME}/meta.json", -1)):
        with pytest.raises(ProtocolError):
            opened.part(ask)
    for file in ("model/x", f"{NAME}/../../curve.key", f"{NAME}//x", "/etc/passwd"):
        with pytest.raises(ProtocolError):
            Fetcher(tmp_path / "here", FINISH_S).begin(NAME, {file: File(1, ""), f"{NAME}/{DIGESTS}": File(1, "")})
    assert not (tmp_path / "here").exists()

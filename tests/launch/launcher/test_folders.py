"""Folders that travel part by part: a half one never has its name, and a damaged one is fetched again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch.launcher.folders import Fetcher, Opened, forget_others, made_in
from launch.launcher.node_messages import Ask, File, Part
from rl.store.checkpoint_folder import Meta, begin, commit, latest, read_journal, verify
from rl.store.digests import DIGESTS
from rl.wire.codec import ProtocolError

NAME = "checkpoints/step-4"


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
    fetcher = Fetcher(here)
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
    fetcher = Fetcher(here)
    fetcher.begin(NAME, opened.files)
    assert not fetch(fetcher, opened, spoil=True)
    assert not any((here / "checkpoints").iterdir())
    fetcher.begin(NAME, opened.files)
    assert fetch(fetcher, opened) and made_in(here) == made_in(made)
    fetcher.close()


def test_a_folder_is_sent_to_the_end_when_it_was_removed_meanwhile(made: Path, tmp_path: Path) -> None:
    known = made_in(made)
    opened = Opened(made, NAME)
    forget_others(made, "")
    assert made_in(made) == {}
    with pytest.raises(OSError):
        Opened(made, NAME)
    fetcher = Fetcher(tmp_path / "here")
    fetcher.begin(NAME, opened.files)
    assert fetch(fetcher, opened) and made_in(tmp_path / "here") == known


def test_a_folder_replaces_an_earlier_one_of_its_name_and_one_that_is_cancelled_leaves_nothing(
    made: Path, tmp_path: Path
) -> None:
    here = tmp_path / "here"
    begin(here / "checkpoints", 4)
    commit(here / "checkpoints", Meta(4, 7, 1), b"of another timeline", keep=2)
    opened = Opened(made, NAME)
    fetcher = Fetcher(here)
    fetcher.begin(NAME, opened.files)
    fetcher.take(opened.part(fetcher.asks(0.0)[0]), 0.0)
    fetcher.cancel()
    assert [path.name for path in (here / "checkpoints").iterdir()] == ["step-4"]

    fetcher.begin(NAME, opened.files)
    assert fetch(fetcher, opened) and made_in(here) == made_in(made)


def test_nothing_but_the_files_of_the_folder_is_written_or_read(made: Path, tmp_path: Path) -> None:
    opened = Opened(made, NAME)
    for ask in (Ask("run.json", 0), Ask(f"{NAME}/../../run.json", 0), Ask(f"{NAME}/meta.json", -1)):
        with pytest.raises(ProtocolError):
            opened.part(ask)
    for file in ("model/x", f"{NAME}/../../curve.key", f"{NAME}//x", "/etc/passwd"):
        with pytest.raises(ProtocolError):
            Fetcher(tmp_path / "here").begin(NAME, {file: File(1, ""), f"{NAME}/{DIGESTS}": File(1, "")})
    assert not (tmp_path / "here").exists()

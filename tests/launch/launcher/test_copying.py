"""What the head copies from the learner's machine, and what it sends to where ranks begin: no sockets here."""

from __future__ import annotations

import os
from pathlib import Path

from launch.launcher.copying import Copying
from launch.launcher.folders import Opened, made_in
from launch.launcher.node_messages import Ask, FromHead, Sent
from rl.store.checkpoint_folder import Meta, begin, commit
from tests.conftest import MakeRun


def checkpoint(run_folder: Path, step: int) -> str:
    begin(run_folder / "checkpoints", step)
    commit(run_folder / "checkpoints", Meta(step, 0, 1), b"journal", keep=9)
    return f"checkpoints/step-{step}"


def is_open(name: str) -> bool:
    return any(name in os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))


def test_what_ranks_began_from_takes_no_room_any_more_once_they_have_made_another(
    make_run: MakeRun, tmp_path: Path
) -> None:
    """A file that is open stays on the disk, which has room for so many checkpoints."""
    run = make_run()
    checkpoint(run.folder, 4)
    asked: list[FromHead] = []
    copying = Copying(run, lambda _, message: asked.append(message))
    copying.begin("learner.0.0", b"a machine")
    told = copying.begin("learner.0.1", b"another")
    assert told is not None and told.name == "checkpoints/step-4"
    assert is_open("step-4"), "it is sent to its end, whatever its name is by then"

    opened = Opened(tmp_path, checkpoint(tmp_path, 8))
    copying.copies.offered(b"another", made_in(tmp_path))
    copying.turn()
    copying.sent(b"another", Sent(opened.name, opened.files))
    while "checkpoints/step-4" in made_in(run.folder):
        for ask in [message for message in asked if isinstance(message, Ask)]:
            asked.remove(ask)
            copying.take(b"another", opened.part(ask))
        copying.turn()
    assert made_in(run.folder) == made_in(tmp_path)
    assert not is_open("step-4")
    copying.close()


def test_nor_where_they_make_it_in_the_folder_of_the_head(make_run: MakeRun) -> None:
    run = make_run("learner.ranks=2")
    first = checkpoint(run.folder, 4)
    copying = Copying(run, lambda *_: None)
    copying.begin("learner.0.0", b"")
    copying.begin("learner.0.1", b"")
    told = copying.begin("learner.1.1", b"another")
    assert told is not None and told.name == first
    holds = made_in(run.folder)
    copying.hold(b"another", holds)
    assert is_open("step-4")

    checkpoint(run.folder, 8)
    copying.hold(b"another", holds)
    assert not is_open("step-4")
    copying.close()

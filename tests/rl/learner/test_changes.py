"""Changes of a run that goes on: what is asked for once is done once, also over a death, and can be replayed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from rl.config.schema import LearnerConfig
from rl.learner.changes import WISH, Change, read_changes, set_at, settle, take_wish, unfinished
from rl.replay.recorded import Recorded
from rl.replay.replay import Request, replayed
from rl.store.checkpoint_folder import Meta, begin, commit, steps_of
from rl.wire.messages import BatchRequest, Done, Metrics, Published
from rl.wire.run import RunFile
from tests.rl.learner.learner_harness import Harness
from tests.rl.replay import recording

STEPS = 12


def wish(folder: Path, **asked: object) -> None:
    (folder / WISH).write_bytes(msgspec.json.encode(Change(**asked)))  # type: ignore[arg-type]


def checkpoints(folder: Path, *steps: int) -> None:
    for step in steps:
        begin(folder / "checkpoints", step)
        commit(folder / "checkpoints", Meta(step, 0, 1), b"", keep=9)


def test_what_is_set_holds_from_its_step_on_and_an_undo_takes_later_ones_back(tmp_path: Path) -> None:
    checkpoints(tmp_path, 2, 4)
    wish(tmp_path, sets={"learner.lr": 0.5})
    assert take_wish(tmp_path, 3, timeline=0) == Change(3, 0, {"learner.lr": 0.5})
    assert take_wish(tmp_path, 4, timeline=0) is None
    wish(tmp_path, sets={"learner.max_grad_norm": 9.0})
    take_wish(tmp_path, 5, timeline=0)
    assert [dict(set_at(read_changes(tmp_path), step)) for step in (2, 3, 5)] == [
        {},
        {"learner.lr": 0.5},
        {"learner.lr": 0.5, "learner.max_grad_norm": 9.0},
    ]

    wish(tmp_path, undo=4)
    assert take_wish(tmp_path, 6, timeline=0) == Change(4, 1, {}, 4)
    assert set_at(read_changes(tmp_path), 9) == {"learner.lr": 0.5}
    assert (unfinished(tmp_path, 0), unfinished(tmp_path, 1)) == (4, None)

    wish(tmp_path, undo=2)
    assert take_wish(tmp_path, 6, timeline=1, may_undo=False) is None and not (tmp_path / WISH).exists()
    assert [*steps_of(tmp_path / "checkpoints")] == [2, 4]

    began = LearnerConfig(lr=0.1)
    config = began.model_copy()
    settle(config, began, set_at(read_changes(tmp_path), 9))
    assert config.lr == 0.5
    settle(config, began, {})
    assert config == began


@pytest.mark.parametrize("to", [2, 8, 7])
def test_an_undo_out_of_reach_is_dropped(tmp_path: Path, to: int) -> None:
    """Older than the two newest checkpoints, not before the present step, or no checkpoint at all."""
    checkpoints(tmp_path, 2, 4, 6)
    wish(tmp_path, undo=to)
    assert take_wish(tmp_path, 8, timeline=0) is None
    assert read_changes(tmp_path) == [] and not (tmp_path / WISH).exists()
    assert [*steps_of(tmp_path / "checkpoints")] == [2, 4, 6]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFile]:
    made = recording.begin(tmp_path, "learner.ranks=2", f"steps={STEPS}")
    yield made
    shutil.rmtree(made.folder)


def play(harness: Harness, asked: dict[int, dict[str, object]], *, dies: bool = False) -> None:
    """The whole run: batches as they are asked for, and a wish after the row of a step. dies: right after an undo."""
    timeline = 0

    while not any(isinstance(message, Done) for message in harness.inbox):
        harness.pump()
        messages, harness.inbox[:] = list(harness.inbox), [each for each in harness.inbox if isinstance(each, Done)]
        for message in messages:
            match message:
                case Published(version) if version.timeline > timeline and dies:
                    timeline, dies = version.timeline, False
                    harness.restart()
                    break
                case Published(version):
                    timeline = version.timeline
                case BatchRequest(step):
                    recording.send(harness, step, timeline)
                case Metrics():
                    recording.keep_row(harness, message)
                    if (wanted := asked.pop(message.step, None)) is not None:
                        wish(harness.run.folder, **wanted)

    harness.finish()


def versions(folder: Path) -> list[tuple[int, int, int]]:
    lines = map(json.loads, (folder / "versions.jsonl").read_text().splitlines())
    return [(line["timeline"], line["n"], line["checksum"]) for line in lines]


@pytest.mark.parametrize("dies", [pytest.param(False, marks=pytest.mark.docs), True])
def test_a_learner_goes_back_and_goes_on_as_if_it_had_been_resumed(run: RunFile, dies: bool) -> None:
    """Both ranks: the old version has its old bytes under a new timeline, and the same batches lead to the same ones,
    up to where nothing is set any more."""
    with Harness(run) as harness:
        play(harness, {4: {"sets": {"learner.lr": 0.5}}, 6: {"undo": 3}}, dies=dies)

    changed, undone = read_changes(run.folder)
    assert (undone.step, undone.timeline, undone.undo) == (3, 1, 3)
    told = versions(run.folder)
    first = {n: checksum for timeline, n, checksum in told if timeline == 0}
    again = {n: checksum for timeline, n, checksum in told if timeline == 1}
    assert sorted(again) == [*range(3, STEPS + 1)]
    assert (
        all(again[n] == first[n] for n in range(3, changed.step + 1))
        and again[changed.step + 1] != first[changed.step + 1]
    )

    rows = list(replayed(Recorded(run.folder), Request(0, STEPS)))
    assert all(row.identical and row.tensors == [] for row in rows)
    assert {row.values["train/lr"] for row in rows[1:]} == {0.01}


def test_a_replay_sets_what_was_set(run: RunFile) -> None:
    with Harness(run) as harness:
        play(harness, {1: {"sets": {"learner.lr": 0.5}}})
    (change,) = read_changes(run.folder)

    recorded = Recorded(run.folder)
    rows = list(replayed(recorded, Request(0, STEPS)))
    assert all(row.identical and row.tensors == [] for row in rows)
    assert [row.values["train/lr"] for row in rows[1:]] == [0.01] * change.step + [0.5] * (STEPS - change.step)

    own = list(replayed(recorded, Request(STEPS - 1, STEPS, {"own": recorded.changed(["learner.lr=0.2"])})))
    assert own[-1].values["train/lr"] == 0.2


def test_a_wish_that_cannot_be_read_is_not_in_the_way_of_the_next(tmp_path: Path) -> None:
    (tmp_path / WISH).write_text('{"undo": 1')
    assert take_wish(tmp_path, 3, timeline=0) is None and not (tmp_path / WISH).exists()

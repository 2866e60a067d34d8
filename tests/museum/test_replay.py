"""A spoilt run is replayed by code that is not: the first step that comes out otherwise is where the alarm points."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.commands.replay import _sampled_otherwise
from rl.learner.tensor_digests import tensor_digests
from rl.replay.recorded import Recorded
from rl.replay.replay import Request, replayed
from rl.store.batch_files import write_batch_part
from rl.store.samples import LineFile
from rl.store.version_digests import FILE, VersionDigests
from rl.wire.messages import BatchPart
from rl.wire.run import RunFile
from tests.conftest import save_run
from tests.museum import reward_faults as reward_faults
from tests.museum import slow_faults as slow_faults
from tests.museum.faults import FAULTS
from tests.museum.lab import SETTINGS, Lab

LIMIT = 1e-3  # nats, of two implementations in float32
Make = Callable[..., "RecordingLab"]


class RecordingLab(Lab):
    """A run that keeps what a real one keeps."""

    def __init__(self, run: RunFile, *overrides: str, steps: int) -> None:
        assert run.model_folder is not None
        super().__init__(run.model_folder, *overrides, steps=steps)
        self.kept = run.folder
        self._digests = LineFile(run.folder / FILE)

    def assembled(self, batch_part: BatchPart) -> BatchPart:
        write_batch_part(self.kept, batch_part)
        return batch_part

    def note_version(self, client: object, n: int) -> None:
        self._digests.write(VersionDigests(0, n, tensor_digests(self.trainer.policy.trainable())))

    def report(self, batch_part: BatchPart, values: dict[str, float], histograms: dict[str, list[float]]) -> None:
        super().report(batch_part, values, histograms)
        with (self.kept / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": batch_part.step + 1} | values) + "\n")


@pytest.fixture
def make_lab(model_folder: Path) -> Iterator[Make]:
    folders: list[Path] = []

    def make(*overrides: str, steps: int = 3) -> RecordingLab:
        run = save_run(*SETTINGS, f"steps={steps}", *overrides, model_folder=model_folder)
        folders.append(run.folder)
        return RecordingLab(run, *overrides, steps=steps)

    yield make
    for folder in folders:
        shutil.rmtree(folder)


def first_otherwise(folder: Path) -> int | None:
    """The first batch whose step, or one of whose tokens, a replay computes otherwise."""
    recorded = Recorded(folder)
    rows = list(replayed(recorded, Request(*recorded.span(None, None), exact=True)))
    computed = [max(0, row.n - 1) for row in rows if not row.identical]
    sampled = [row.n - 1 for row in rows if not row.values.get("exact/max", 0.0) <= LIMIT]
    assert _sampled_otherwise(recorded, rows, LIMIT) == bool(sampled)
    return min([*computed, *sampled], default=None)


def test_a_run_without_a_fault_comes_out_as_it_was(make_lab: Make) -> None:
    lab = make_lab("rollout.alpha=1")
    assert lab.train() == []
    assert first_otherwise(lab.kept) is None


@pytest.mark.docs
@pytest.mark.parametrize("name", ["lr-zero", "frozen-layers", "inexact-late", "old-kv"])
def test_an_alarm_points_to_the_first_step_that_a_replay_computes_otherwise(
    make_lab: Make, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    fault: Any = FAULTS[name]
    lab = make_lab(*fault.overrides, steps=fault.steps)
    with monkeypatch.context() as patch:
        fault.spoil(lab, patch)
        lab.train()
    (raised, *_) = [step for step, alarm in lab.raised if alarm == fault.alarm]

    first = first_otherwise(lab.kept)
    assert first is not None and fault.at <= first <= raised

"""Memory follows what is shown: ten times as long a run, of which as much is shown, takes no more of it."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from experiments.bench._measuring import random_batch_part
from experiments.bench.report import write_samples
from launch.report import gather as gathering
from launch.report import samples as sampling
from launch.report import timeline as bars
from rl.observe.trace import Source, TraceRecord
from rl.observe.trace_events import EpisodeEnded, Requested, ResetBegan, TicketEnded
from rl.store.batch_files import write_batch_part
from rl.store.samples import FOLDER, TRAINED, LineFile, Trained, read_samples, read_trained
from rl.wire.run import RunFile
from rollout.simulate.recipe import read_run
from tests.conftest import MakeRun
from tests.launch.report.runs import copied

TOKENS = 50_000
LONGER = 10
MOST_GROWTH = 2.0
"""Of the peak; where all was held, it grew to nearly LONGER."""


def peak(read: Callable[[], object]) -> int:
    """The most bytes that Python held at once while it read."""
    read()  # what is made once, such as decoders, is made now
    gc.collect()
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def growth(read: Callable[[Path], object], short: Path, long: Path) -> float:
    return peak(lambda: read(long)) / peak(lambda: read(short))


@pytest.fixture
def runs(make_run: MakeRun) -> tuple[RunFile, RunFile]:
    """Two that kept samples, the second LONGER times as many, and what the learner knew of these."""
    short = make_run()
    long = make_run()
    for run, tokens in ((short, TOKENS), (long, LONGER * TOKENS)):
        write_samples(run.folder, tokens)
        file = LineFile(run.folder / FOLDER / TRAINED / "learner.0.0.jsonl")
        for sample in read_samples(run.folder):
            values = sample.logp[len(sample.logp) // 2 :]
            file.write(Trained(sample.ticket_id, 1 + sample.ticket_id // 64, values, values, values, []))
        file.close()
    return short, long


def test_samples_that_are_not_shown_take_no_memory(
    runs: tuple[RunFile, RunFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "MOST_TOKENS", TOKENS // 2)
    of = {run.folder: run for run in runs}
    folders = [run.folder for run in runs]
    assert growth(lambda folder: sampling.gather_samples(folder, of[folder]), *folders) < MOST_GROWTH

    page = sampling.gather_samples(folders[1], runs[1])
    shown = [episode["ticket_id"] for episode in page.facts["episodes"]]
    assert page.facts["kept"] == LONGER * TOKENS // 500 and 20 < len(shown) <= TOKENS // 2 // 500
    assert all(episode["step"] == 1 + episode["ticket_id"] // 64 for episode in page.facts["episodes"])
    assert np.isfinite(page.arrays["advantage"]).sum() == len(shown) * 250


def test_only_the_newest_is_held_where_only_it_is_asked_for(runs: tuple[RunFile, RunFile]) -> None:
    folders = [run.folder for run in runs]
    assert growth(lambda folder: next(read_samples(folder, newest_first=True)), *folders) < MOST_GROWTH
    assert growth(lambda folder: sum(1 for _ in read_samples(folder)), *folders) < MOST_GROWTH
    assert growth(lambda folder: read_trained(folder, {3, 5}), *folders) < MOST_GROWTH

    tickets = [sample.ticket_id for sample in read_samples(folders[0])]
    assert [sample.ticket_id for sample in read_samples(folders[0], newest_first=True)] == tickets[::-1]
    assert tickets == [*range(TOKENS // 500)] and read_trained(folders[0], {3, 5}).keys() == {3, 5}


def test_rows_and_evaluations_that_are_not_shown_take_no_memory(
    played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "_MOST_ROWS", 20)
    monkeypatch.setattr(gathering, "_MOST_HISTOGRAMS", 10)
    whole = (played / "metrics.jsonl").read_text().splitlines()
    row = next(json.loads(line) for line in reversed(whole) if "train/loss" in line)
    run = RunFile.load(played)

    def written(folder: Path, steps: int) -> Path:
        folder.mkdir()
        rows = [row | {"step": step} for step in range(1, steps + 1)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        episodes = [
            {"version": step, "task_index": task, "success": 1.0, "reward": 0.5, "label": "", "info": {"turns": 2.0}}
            for step in range(0, steps, 5)
            for task in range(32)
        ]
        (folder / "evals.jsonl").write_text("".join(json.dumps(each) + "\n" for each in episodes))
        return folder

    def read(folder: Path) -> None:
        found = gathering._of_rows(gathering.Rows(folder / "metrics.jsonl"), run)
        assert len(found["rows"]["step"]) == 20 and len(found["histograms"]["steps"]) == 10
        evals = gathering.Evals(folder / "evals.jsonl")
        assert all(len(evals.of([version])) == 32 for version in evals.versions)

    assert growth(read, written(tmp_path / "short", 60), written(tmp_path / "long", LONGER * 60)) < MOST_GROWTH


def test_a_plan_from_a_run_holds_one_batch(played: Path, tmp_path: Path) -> None:
    part = random_batch_part(2, 8, 100, (200, 400), 1000)
    folders = [copied(played, tmp_path / "short"), copied(played, tmp_path / "long")]
    for folder, steps in zip(folders, (4, LONGER * 4), strict=True):
        shutil.rmtree(folder / "batches")
        row = json.loads((played / "metrics.jsonl").read_text().splitlines()[-2])
        assert "time/step" in row
        rows = [row | {"step": step} for step in range(1, 5 * steps)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
        for step in range(steps):
            write_batch_part(folder, replace(part, step=step))
    assert growth(read_run, *folders) < MOST_GROWTH

    one, ten = (read_run(folder)[1] for folder in folders)
    assert one.length.mean == ten.length.mean and one.length.at(0.3) == pytest.approx(ten.length.at(0.3), rel=0.01)


def test_bars_that_are_not_shown_take_no_memory_and_count_as_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "MOST_BARS", 400)

    def built(episodes: int) -> bars.Timeline:
        builder = bars.Builder(0.0)
        server = Source("env_server", 0, 0)
        for ticket in range(episodes):
            begin, seconds = 10.0 * ticket, 1.0 + ticket % 5
            builder.take(TraceRecord(begin, server, ResetBegan(ticket)))
            builder.take(TraceRecord(begin, server, Requested(ticket, 1, 7)))
            builder.take(TraceRecord(begin + seconds, server, EpisodeEnded(ticket, "done", 1)))
            builder.take(TraceRecord(begin + 6, Source("broker", 0, 0), TicketEnded(ticket, "trained")))
        return builder.timeline()

    assert peak(lambda: built(LONGER * 1000)) < MOST_GROWTH * peak(lambda: built(1000))

    found = built(2000)
    trained = bars.KINDS.index("trained")
    assert found.arrays["episodes.kind"].tolist() == [trained] * 400
    assert set((found.arrays["episodes.length"] * found.facts["tick"]).round().tolist()) == {5.0}, "the longest"
    assert found.facts["leftOut"] == 2 * (2000 - 400) and found.facts["first"] == 0.0
    assert found.facts["work"] == [{"generate": (2000, pytest.approx(3.0), 5.0)}]


def test_tickets_without_an_episode_and_reasons_without_end_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "MOST_BARS", 400)

    def built(tickets: int) -> bars.Timeline:
        builder = bars.Builder(0.0)
        broker, server = Source("broker", 0, 0), Source("env_server", 0, 0)
        builder.take(TraceRecord(0.0, server, ResetBegan(tickets)))
        builder.take(TraceRecord(1.0, broker, TicketEnded(tickets, "stale")))
        for ticket in range(tickets):
            builder.take(TraceRecord(2.0, broker, TicketEnded(ticket, "redundant")))
            reason = "time-out" if ticket % 3 else f"the judge cannot read {ticket}"
            builder.take(TraceRecord(2.0, broker, TicketEnded(ticket, "failed", reason)))
        builder.take(TraceRecord(3.0, server, EpisodeEnded(tickets, "cancelled", 1)))
        return builder.timeline()

    assert peak(lambda: built(LONGER * 3000)) < MOST_GROWTH * peak(lambda: built(3000))

    found = built(3000)
    assert found.failures[0][:2] == ("time-out", 2000)
    assert found.arrays["episodes.kind"].tolist() == [bars.KINDS.index("stale")], "told before its episode was over"

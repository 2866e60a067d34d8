"""What a report says of a run: how it ended, its books, its intervals, its conversations and its bars."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import sys
import time
from base64 import b64decode
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import pytest
from filelock import FileLock

from launch.cli import main
from launch.provenance import Provenance, differences, read_provenance, write_provenance
from launch.report.blocks import Arrays, block_of_arrays, block_of_json, layout
from launch.report.gather import gather, reward_interval
from launch.report.samples import chosen
from launch.report.timeline import KINDS, Builder
from launch.sittings import read_rows
from rl.config.schema import load_config
from rl.observe.alarms import RaisedAlarm, keep_alarm
from rl.observe.trace import Source, TraceRecord, trace_files
from rl.observe.trace_events import (
    EpisodeEnded,
    FirstToken,
    Issued,
    ProcessDied,
    Pulse,
    Requested,
    ResetBegan,
    ResetEnded,
    SamplingBegan,
    SpanBegan,
    SpanEnded,
    TicketEnded,
    TraceEvent,
    Wait,
)
from rl.store.samples import Sample
from rl.weights.host import clean_up
from rl.wire.run import RunFile
from tests.launch.report.runs import bare, copied
from tests.launch.simulated_run import ROOT

SERVER = Source("env_server", 0, 0)
GENERATOR = Source("generator", 0, 0)
LEARNER = Source("learner", 0, 0)
PROXY = Source("proxy", 0, 0)
BROKER = Source("broker", 0, 0)


def test_how_a_run_ended(played: Path, tmp_path: Path) -> None:
    assert gather(played).facts["state"] == "finished"
    killed = copied(played, tmp_path / "killed")
    assert gather(killed).facts["state"] == "killed"
    with FileLock(killed / "lock"):
        assert gather(killed).facts["state"] == "running"

    failed = copied(played, tmp_path / "failed", summary={"error": "broker.0: no space", "steps": 3})
    facts = gather(failed).facts
    assert (facts["state"], facts["error"]) == ("failed", "broker.0: no space")
    assert gather(copied(played, tmp_path / "stopped", summary={"steps": 2})).facts["state"] == "stopped"

    ended = copied(played, tmp_path / "by-time", summary={"steps": 2})
    row = {"step": 2, "time": 1.0, "train/loss": 0.1, "time/over": 1.01}
    (ended / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    assert gather(ended).facts["state"] == "finished"


def test_the_books_of_a_killed_run_are_those_of_its_last_row(played: Path, tmp_path: Path) -> None:
    closed = gather(played).facts
    samples = closed["ledger"]["samples"]
    assert samples["issued"] == sum(count for state, count in samples.items() if state != "issued")

    killed = gather(copied(played, tmp_path / "killed")).facts
    assert killed["ledger"]["samples"]["trained"] == samples["trained"] == 3 * 16
    assert killed["staleness"] == closed["staleness"]
    assert killed["evaluations"] == closed["evaluations"]
    first, last = closed["evaluations"]
    assert (first["step"], last["step"]) == (0, 3) and 0 < first["seconds"] < last["seconds"] < closed["seconds"]
    assert first["low"] <= first["accuracy"] <= first["high"]


def test_a_run_that_was_killed_at_any_byte_can_be_read(played: Path, tmp_path: Path) -> None:
    torn = copied(played, tmp_path / "torn")
    for path in [torn / "metrics.jsonl", torn / "evals.jsonl", *torn.glob("trace/*"), *torn.glob("samples/*.jsonl")]:
        path.write_bytes(path.read_bytes()[:-7])
    facts = gather(torn).facts
    assert facts["state"] == "killed" and facts["timeline"]["lanes"]

    facts = gather(bare(played, tmp_path / "bare")).facts
    assert facts["ledger"] is None and facts["rows"] == {} and facts["samples"]["episodes"] == []


def test_a_run_that_goes_on_and_is_killed_in_its_middle(tmp_path: Path) -> None:
    overrides = [f"runs={tmp_path}", "steps=5000", "eval.tasks=0", "tracking.samples=1", "tracking.trace=full"]
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", *overrides]
    run = tmp_path / "simulated"
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as supervisor:
        try:
            deadline = time.monotonic() + 240
            while len(list(read_rows(run))) < 5:
                assert supervisor.poll() is None and time.monotonic() < deadline, "no step was trained"
                time.sleep(0.05)
            assert gather(run).facts["state"] == "running"
        finally:
            children = psutil.Process(supervisor.pid).children(recursive=True)
            supervisor.kill()
            _, alive = psutil.wait_procs(children, timeout=240)
            left = RunFile.load(run)
            clean_up(left.run_id)  # the next start would sweep them
            shutil.rmtree(left.socket_folder)

    assert not alive, "children end with their supervisor"
    facts = gather(run).facts
    assert facts["state"] == "killed" and facts["samples"]["episodes"] and facts["waits"]
    assert {lane["name"].partition(".")[0] for lane in facts["timeline"]["lanes"]} == {
        "learner",
        "generator",
        "env_server",
    }
    samples = facts["ledger"]["samples"]
    assert samples["trained"] == 16 * len(facts["rows"]["step"]) > 0
    assert samples["issued"] == sum(samples.values()) - samples["issued"]


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "no folder of a run" in capsys.readouterr().err
    (tmp_path / "run.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "of another version" in capsys.readouterr().err


def test_differences_are_to_the_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rollout: {alpha: 2}\n")
    config = load_config(recipe, ["rollout.alpha=1", "seed=7"])
    write_provenance(tmp_path, recipe, config)
    origin = read_provenance(tmp_path, config)
    assert origin.differences == {"seed": (0, 7), "rollout.alpha": (2.0, 1.0)}
    assert origin.recipe == str(recipe) and origin.versions["fresco"] and origin.machine["cores"]

    (tmp_path / "provenance.json").unlink()
    assert read_provenance(tmp_path, config) == Provenance(differences=differences(load_config(None), config))


def test_the_interval_of_a_reward_counts_groups_not_samples() -> None:
    row = reward_interval([1, 1, 0, 0, 1, 1, 0, 0], group_size=2)  # group means 1, 0, 1, 0: sd 0.577, 4 groups
    assert row["reward/low"] == pytest.approx(0.5 - 1.96 * 0.57735 / 2, abs=1e-3)
    assert row["reward/high"] == pytest.approx(0.5 + 1.96 * 0.57735 / 2, abs=1e-3)
    assert reward_interval([1, 0], group_size=2) == {}


def test_blocks_come_back_as_they_were() -> None:
    arrays: Arrays = {"a": np.array([1, 70000, 2**32 - 1], np.uint32), "b": np.array([-1, 5], np.int16)}
    assert layout(arrays) == [("a", "u4", 3), ("b", "i2", 2)]
    content = gzip.decompress(b64decode(block_of_arrays(arrays)))
    planes = np.frombuffer(content[:12], np.uint8).reshape(4, 3)
    assert np.array_equal(np.ascontiguousarray(planes.T).view(np.uint32).ravel(), arrays["a"])
    assert json.loads(gzip.decompress(b64decode(block_of_json({"x": float("nan")})))) == {"x": None}


def test_only_whole_groups_are_left_out() -> None:
    samples = [
        Sample(0.0, "train", i, i // 4, 0, 0.0, False, "done", 1.0, [1] * 10, [0.0] * 10, [0] * 10, [])
        for i in range(80)
    ]
    assert chosen(enumerate(samples), 10_000) == ([*range(80)], 80)
    some, kept = chosen(enumerate(samples), 300)
    groups = [samples[number].group_id for number in some]
    assert kept == 80 and sum(len(samples[number].token_ids) for number in some) <= 300
    assert all(groups.count(group) == 4 for group in groups) and len(set(groups)) >= 5


def test_an_evaluation_of_more_tokens_than_are_shown_hides_no_other_sample() -> None:
    def sample(kind: str, task: int, group: int, version: int) -> Sample:
        return Sample(0.0, kind, 0, group, task, 0.0, False, "done", 1.0, [1] * 10, [0.0] * 10, [version] * 10, [])

    first = [sample("eval", task, -1, 0) for task in range(40) for _ in range(2)]
    trained = [sample("train", 0, group, 1) for group in range(20) for _ in range(4)]
    some, kept = chosen(enumerate(first + trained), 300)
    assert kept == 160 and 200 <= 10 * len(some) <= 300
    assert sum(number >= len(first) for number in some) >= 8 <= sum(number < len(first) for number in some)
    assert all(number ^ 1 in some for number in some if number < len(first)), "all of a task"

    long = [sample("train", 0, 7, 1) for _ in range(50)]
    assert set(chosen(enumerate(long + trained), 300)[0]) <= {*range(50, 130)}
    assert chosen(enumerate(long), 300) == ([*range(50)], 50) and chosen([], 300) == ([], 0)


# ---------------------------------------------------------------- the trace as bars


def built(
    *told: tuple[float, Source, TraceEvent],
) -> tuple[dict[str, list[tuple[int, float, float, str, int]]], Builder]:
    """(row, begin, end, kind, ref) of each bar, by layer, read as the page reads them."""
    builder = Builder(100.0)
    for second, source, moment in told:
        builder.take(TraceRecord(100.0 + second, source, moment))
    timeline = builder.timeline()
    tick = timeline.facts["tick"]

    found: dict[str, list[tuple[int, float, float, str, int]]] = {}
    for layer in ("episodes", "parts"):
        columns = {name: timeline.arrays[f"{layer}.{name}"] for name in ("begin", "length", "kind", "ref", "rows")}
        found[layer] = []
        for row, (first, end) in enumerate(pairwise(columns["rows"])):
            begins = np.cumsum(columns["begin"][first:end].astype(np.int64))
            for i, begin in zip(range(first, end), begins, strict=True):
                seconds = round(float(begin) * tick, 3)
                length = round(float(columns["length"][i]) * tick, 3)
                kind = timeline.facts["kinds"][columns["kind"][i]]
                found[layer].append((row, seconds, round(seconds + length, 3), kind, int(columns["ref"][i])))
    return found, builder


def test_an_episode_is_a_bar_of_its_turns_with_the_end_of_its_ticket() -> None:
    bars, builder = built(
        (0.5, BROKER, Issued(7, "train", 1, 1, 1, 0, 0, 0)),
        (1.0, SERVER, ResetBegan(7)),
        (1.2, SERVER, ResetEnded(7)),
        (1.2, SERVER, ResetBegan(8)),
        (1.3, SERVER, Requested(7, 1, 10)),
        (1.4, GENERATOR, SamplingBegan(7, 1, 0.0)),
        (1.5, GENERATOR, FirstToken(7, 1, 0)),
        (2.0, SERVER, EpisodeEnded(7, "done", 1)),
        (2.1, SERVER, ResetBegan(9)),
        (2.5, BROKER, TicketEnded(7, "stale")),
        (2.5, BROKER, TicketEnded(6, "failed", "no answer within 3 s")),
        (2.5, BROKER, Issued(10, "train", 2, 0, 42, 0, 0, 0)),
        (2.5, BROKER, Issued(11, "train", 2, 1, 43, 0, 0, 0)),
        (2.5, BROKER, TicketEnded(10, "failed", "no answer within 3 s")),
        (2.5, BROKER, TicketEnded(11, "failed", "no answer within 3 s")),
    )
    assert bars["episodes"] == [(1, 1.0, 2.0, "stale", 7), (1, 2.1, 2.5, "open", 9), (2, 1.2, 2.5, "open", 8)]
    assert (1, 1.3, 2.0, "generate", 7) in bars["parts"]
    assert (0, 1.4, 1.5, "prefill", 7) in bars["parts"] and (0, 1.5, 2.5, "decode", 7) in bars["parts"]

    timeline = builder.timeline()
    assert timeline.failures == [("no answer within 3 s", 3, [42, 43])], "what was issued before the trace has no task"
    generator, server = timeline.facts["work"]
    assert generator["prefill"] == pytest.approx((1, 0.1, 0.1)) and server["generate"] == pytest.approx((1, 0.7, 0.7))
    assert server["reset"] == pytest.approx((3, (0.2 + 1.3 + 0.4) / 3, 1.3)), "one goes on, one was just begun"


def test_what_a_dead_process_had_begun_ends_with_it_and_frees_its_rows() -> None:
    bars, builder = built(
        (1.0, SERVER, ResetBegan(7)),
        (2.0, Source("supervisor", 0, 0), ProcessDied("env_server", 0, 0, "killed by SIGKILL")),
        (3.0, Source("env_server", 0, 1), ResetBegan(8)),
        (4.0, Source("env_server", 0, 1), EpisodeEnded(8, "done", 1)),
    )
    assert bars["episodes"] == [(0, 1.0, 2.0, "open", 7), (0, 3.0, 4.0, "open", 8)]
    assert builder.timeline().facts["marks"] == [(2.0, "death", "env_server.0", "killed by SIGKILL")]


def test_alarms_stand_on_the_timeline_without_a_trace_of_the_supervisor(played: Path, tmp_path: Path) -> None:
    run = copied(played, tmp_path / "run")
    for path in run.glob("trace/supervisor.*"):
        path.unlink()
    alarm = RaisedAlarm.of("process-died", 2, "supervisor", "generator.1 killed")
    keep_alarm(run, alarm)
    facts = gather(run).facts
    marks = [mark for mark in facts["timeline"]["marks"] if mark[1] == "alarm"]
    assert marks == [(pytest.approx(alarm.time - facts["started"]), "alarm", "", "process-died: generator.1 killed")]


def test_spans_keep_their_names_and_waits_add_up_over_incarnations() -> None:
    pulse = Pulse(True, 1, 0.5, {"broker": 2.0}, {}, longest=Wait(1.5, "broker", 2))
    bars, builder = built(
        (0.0, LEARNER, SpanBegan("wait broker", 1)),
        (2.0, LEARNER, SpanEnded("wait broker", 1)),
        (2.0, LEARNER, SpanBegan("train", 1)),
        (3.0, LEARNER, SpanEnded("train", 1)),
        (4.0, LEARNER, pulse),
        (6.0, Source("learner", 0, 1), pulse),
        (7.0, Source("learner", 0, 1), pulse),
        (7.0, PROXY, Pulse(True, 1, 0.5, {"generators": 9.0}, {}, longest=Wait(1.0, "generators"))),
        (8.0, LEARNER, SpanBegan("publish", 6)),
        (9.0, PROXY, Pulse(True, 1, 0.5, {"generators": 9.5}, {}, longest=Wait(1.0, "generators"))),
    )
    assert [bar[3] for bar in bars["parts"]] == ["wait broker", "train", "publish"]
    learner, proxy = builder.timeline().waits
    assert learner == {"name": "learner.0", "seconds": 9.0, "causes": {"broker": 4.0}, "longest": (1.5, "broker", 2)}
    assert proxy["longest"] == (1.0, "generators", 2), "of the step in which it was told first"


def _sources_of(run: Path, kind: type[TraceEvent]) -> set[str]:
    """Which generators and servers had work: on a busy machine one may come when three steps are done."""
    return {
        f"{file.source.role}.{file.source.index}"
        for file in trace_files(run)
        if any(isinstance(moment, kind) for _, moment in file.read())
    }


def test_bars_of_a_row_do_not_overlap(played: Path) -> None:
    page = gather(played)
    lanes = {lane["name"] for lane in page.facts["timeline"]["lanes"]}
    assert lanes == {"learner.0", "learner.1"} | _sources_of(played, SamplingBegan) | _sources_of(played, ResetBegan)

    arrays = page.arrays["timeline"]
    for layer in ("episodes", "parts"):
        rows = arrays[f"{layer}.rows"]
        for first, end in pairwise(rows):
            begins = np.cumsum(arrays[f"{layer}.begin"][first:end].astype(np.int64))
            ends = begins + arrays[f"{layer}.length"][first:end]
            assert (ends[:-1] <= begins[1:] + 2).all(), "rounded to ticks"
    trained = KINDS.index("trained")
    assert np.count_nonzero(arrays["episodes.kind"] == trained) == 3 * 16

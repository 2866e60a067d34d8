"""What `bench machines` makes of the rows of a run, and what it says where it cannot run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.bench import machines
from experiments.bench.machines import Row, Run, cost_of
from experiments.machines import missing

ROOT = Path(__file__).parents[2]


def rows(first: int, last: int, at: float, pace_s: float, unused: float = 0.0) -> list[Row]:
    return [Row(step, at + pace_s * (step - first), unused) for step in range(first, last + 1)]


def test_an_event_costs_the_time_beyond_the_pace_before_it() -> None:
    before = rows(1, 30, at=100.0, pace_s=0.5)
    stalled = rows(31, 60, at=before[-1].at + 0.5 + 7.0, pace_s=0.5, unused=90.0)
    seconds, tokens = cost_of(before, before + stalled, begun=before[-1].at)
    assert (seconds, tokens) == pytest.approx((7.0, 90.0))

    calm = rows(31, 60, at=before[-1].at + 0.5, pace_s=0.5)
    assert cost_of(before, before + calm, begun=before[-1].at) == pytest.approx((0.0, 0.0))


def test_slow_steps_long_before_say_nothing_of_the_pace() -> None:
    before = rows(1, 30, at=0.0, pace_s=9.0) + rows(31, 60, at=400.0, pace_s=0.5)
    after = rows(61, 80, at=before[-1].at + 0.5, pace_s=0.5)
    assert cost_of(before, before + after, begun=before[-1].at).seconds == pytest.approx(0.0)


def test_a_step_that_was_taken_back_counts_when_it_was_first_trained(tmp_path: Path) -> None:
    said = [(1, 10.0, 0.0), (2, 11.0, 50.0), (2, 19.0, 90.0), (3, 20.0, 100.0)]
    names = ("step", "time", "broker/unused_tokens")
    others = {"train/loss": 0.0, "histogram/length": [3.0, 5.0], "queue/running": 2.0, "queue/batched": 4.0}
    lines = [json.dumps(dict(zip(names, each, strict=True)) | others) for each in said]
    (tmp_path / "simulated").mkdir()
    (tmp_path / "simulated" / "metrics.jsonl").write_text(
        "\n".join([*lines, json.dumps({"step": 3, "time": 21.0}), '{"step": 4, "ti'])
    )
    run = Run.__new__(Run)
    run._folder = tmp_path
    assert [row[:3] for row in run.rows()] == [(1, 10.0, 0.0), (2, 11.0, 50.0), (3, 20.0, 100.0)]
    assert {row[3:] for row in run.rows()} == {(8.0, 24.0)}


def test_steps_that_are_taken_back_with_their_samples_are_lost_tokens() -> None:
    kept = [Row(step, 100.0 + step, unused=10.0, tokens=50.0, open=70.0) for step in range(1, 31)]
    gone = [Row(step, 100.0 + step, unused=14.0, tokens=50.0, open=70.0) for step in (31, 32)]
    anew = [Row(step, 110.0 + step, unused=13.0, tokens=60.0, open=80.0) for step in range(31, 53)]
    seconds, tokens = cost_of(kept + gone, kept + anew, begun=gone[-1].at, anew=True)
    assert seconds == pytest.approx(10.0)
    assert tokens == 2 * 50.0 + 70.0 + (14.0 - 10.0) + (13.0 - 10.0)
    assert cost_of(kept, kept + anew, begun=kept[-1].at, anew=True).tokens == 70.0 + 3.0, "its last step was saved"


def test_a_head_that_was_away_for_longer_than_a_lease_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.__new__(Run)
    monkeypatch.setattr(run, "_kill_head", lambda: None)
    monkeypatch.setattr(run, "_begin_head", lambda: None)
    monkeypatch.setattr(run, "said", lambda: "machine 1 is back, with nothing\nmachines that are not back")
    monkeypatch.setattr(run, "_head", subprocess.Popen(["sleep", "100"]), raising=False)
    with run._head, pytest.raises(SystemExit, match="longer than a lease to be back: --lease\nmachine 1"):
        try:
            run.replace_head()
        finally:
            run._head.kill()


def test_what_cannot_be_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="--rounds=0 and --lease=6 are 1 or more"):
        machines.main(["--rounds", "0"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(SystemExit, match=r"several machines on one box: (no|not root)"):
        machines.main([])


@pytest.mark.docs
@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}")
def test_a_lost_machine_costs_its_lease_and_a_late_one_less(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    lease_s = 15  # a head that is killed must be back within it, on a busy machine too
    command = [sys.executable, "-m", "experiments.bench", "machines", "--rounds", "1", "--lease", str(lease_s)]
    ended = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=840)
    assert ended.returncode == 0, ended.stderr

    events = {each["event"]: each for each in json.loads(out.read_text())["events"]}
    found = {event: each["seconds"]["median"] for event, each in events.items()}
    lost = [seconds for event, seconds in found.items() if event.endswith(("cut off", "powered off"))]
    joined = [seconds for event, seconds in found.items() if event.endswith(("again", "late"))]
    assert len(lost) == 3 and len(joined) == 2
    assert min(lost) > max(lease_s * 2 / 3, *joined), "most of a lease is waited for before a machine is taken for lost"

    at_once, later = "the head killed, back at once", "the head killed, back when no agent is left"
    assert found[at_once] < found[later] and found[later] > 2 * lease_s, "the lease of the agents, and of the head"
    assert events[later]["tokens"]["median"] > events[at_once]["tokens"]["median"]

"""What the terminal shows: what matters first, and all of it on a screen of 80 by 24."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launch.children import Child
from launch.cli import main
from launch.live import Display
from launch.plan import ProcessSpec
from launch.preflight import Preflight
from launch.summary import Children, Observed
from rl.observe.trace_events import Wait
from rl.wire.messages import Heartbeat
from rl.wire.run import RunFile
from tests.conftest import MakeRun

ROLES = {"broker": 1, "proxy": 1, "learner": 8, "generator": 20, "env_server": 16}


def children() -> Children:
    unused: Any = None
    found: Children = {}
    for role, count in ROLES.items():
        for index in range(count):
            beat = Heartbeat(role, index, 0, 1, busy=index % 2 == 0, waits={"broker": 1000.0})
            spec = ProcessSpec(role, index, "module")
            found[role, index] = Child(spec, 0, unused, Path(), 0.0, beat, registered=index < 18)
    return found


def test_a_row_tells_who_has_waited_for_whom() -> None:
    values = Observed(started_at=time.time(), step=0).step_values(children())
    assert values["wait/learner.7/broker"] == 1000.0
    assert len([name for name in values if name.startswith("wait/")]) == sum(ROLES.values())


def test_everything_stands_on_a_small_screen(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    observed = Observed(started_at=time.time() - 75, step=0)
    display = Display(make_run("steps=120"), observed)
    for step, accuracy in ((0, 0.25), (60, 0.5), (120, 0.875)):
        observed.add(step, {"eval/accuracy": accuracy})
    observed.waited("generator.2", Wait(14.2, "work", 7))
    observed.waited("learner.3", Wait(9.0, "broker", 5))
    row = {"rollout/reward": 0.625, "train/loss": -1e-9, "tokens_per_second": 2345.0, "time/step": 0.5}
    observed.add(34, row)
    display.row(34, row)
    for number in range(9):
        display.note(f"note {number} " + "x" * 200)

    assert "loss +0.0000" in capsys.readouterr().out
    console = Console(width=80, height=24, record=True)
    console.print(display._table(children()))
    lines = console.export_text().splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80

    top = "\n".join(lines[:4])
    for shown in ("34/120", "left", "0.625", "0.250 (step 0) -> 0.875 (step 120)", "2345 tokens/s"):
        assert shown in top
    text = "\n".join(lines)
    assert "generator x 20" in text and "2 starting" in text
    assert "longest wait" in text and ".2 work 14.2 s, step 7" in text
    assert ".3 broker 9.0 s, step 5" in text and "1000" not in text
    assert "note 8" in text and "note 5" not in text


def test_a_run_prints_what_was_changed_and_where_the_rest_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execute(run: RunFile, checked: Preflight, begin: object) -> int:
        run.socket_folder.rmdir()
        return 0

    monkeypatch.setattr("launch.commands.run.execute", execute)
    arguments = ["run", "simulated", f"runs={tmp_path}", "rollout.alpha=2"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert "rollout.alpha=2" in first and str(tmp_path / "simulated" / "config.yaml") in first
    assert len(first.splitlines()) <= 3

    assert main(arguments) == 0
    assert f"the earlier run of this name is kept as {tmp_path / 'simulated.1'}" in capsys.readouterr().out

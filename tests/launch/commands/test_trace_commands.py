"""`fresco trace` and `fresco top`: of a finished run, of one that was killed, and of one that goes on."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.bench._synthetic_trace import write_trace
from launch.cli import main
from launch.commands.top import Watch
from rl.observe.trace import FOLDER, Trace
from rl.observe.trace_events import AlarmShown, ProcessDied, Pulse, Requested, ResetBegan, SpanBegan, SpanEnded
from tests.conftest import MakeRun

ROOT = Path(__file__).parents[3]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "launch.cli", *arguments]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the simulated recipe."""
    folder = tmp_path_factory.mktemp("runs")
    done = subprocess.run(
        command("run", "experiments/simulated.yaml", f"runs={folder}", "steps=3", "eval.tasks=4"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder / "simulated"


@pytest.fixture
def going_on(tmp_path: Path) -> Iterator[Path]:
    """A run that has trained a step, and has many more to go."""
    arguments = ("run", "experiments/simulated.yaml", f"runs={tmp_path}", "steps=100000")
    process = subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = tmp_path / "simulated" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not (metrics.exists() and '"train/loss"' in metrics.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)

    yield tmp_path / "simulated"
    process.send_signal(signal.SIGINT)
    process.wait(240)


# ------------------------------------------------------------ fresco trace


def exported(run: Path, out: Path) -> list[dict[str, Any]]:
    assert main(["trace", str(run), "--out", str(out)]) == 0
    content = gzip.decompress(out.read_bytes()) if out.suffix == ".gz" else out.read_bytes()
    rows: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    return rows


def check_structure(rows: list[dict[str, Any]]) -> None:
    """What a viewer asks for: names of all that is used, times, bars that nest, arrows with both ends."""
    processes = {row["pid"] for row in rows if row.get("name") == "process_name"}
    threads = {(row["pid"], row["tid"]) for row in rows if row.get("name") == "thread_name"}
    assert len({number for _, number in threads}) == len(threads), "Perfetto takes two threads for one"
    bars: defaultdict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)  # in nanoseconds
    for row in rows:
        assert row["ph"] in "MXiCsf" and row["pid"] in processes
        if row["ph"] == "M":
            continue
        assert row["ts"] >= 0 and (row["pid"], row["tid"]) in threads
        if row["ph"] == "X":
            assert row["dur"] >= 0
            begin, lasts = int(1000 * row["ts"]), int(1000 * row["dur"])  # as Perfetto reads them
            bars[row["pid"], row["tid"]].append((begin, begin + lasts))

    for lane in bars.values():
        open_until: list[int] = []
        for begin, end in sorted(lane, key=lambda bar: (bar[0], -bar[1])):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "bars of a lane overlap: Perfetto drops one"
            open_until.append(end)

    begun = {row["id"] for row in rows if row["ph"] == "s"}
    assert {row["id"] for row in rows if row["ph"] == "f"} <= begun


def test_a_finished_run_as_a_chrome_trace(played: Path, tmp_path: Path) -> None:
    rows = exported(played, tmp_path / "trace.json")
    check_structure(rows)

    names = [row["args"]["name"] for row in rows if row["name"] == "process_name"]
    assert {"learner.0.0", "learner.1.0", "generator.0.0", "env_server.1.0", "broker.0.0", "supervisor.0.0"} <= {*names}
    bars = [row for row in rows if row["ph"] == "X"]
    assert not [bar for bar in bars if bar["args"].get("unfinished") and bar["name"].startswith("ticket")]

    episodes = [bar for bar in bars if "task" in bar["args"]]
    sampled = [bar for bar in bars if "held_s" in bar["args"]]
    asked = [bar for bar in bars if bar["name"] == "generate"]
    assert len(episodes) == 3 * 16 + 2 * 4 and len(asked) == len(sampled) == 2 * len(episodes)
    assert len([row for row in rows if row["ph"] == "f"]) == len(sampled)
    assert sum(bar["args"]["tokens"] for bar in asked) == sum(bar["args"]["tokens"] for bar in sampled)
    assert {"train", "publish", "wait broker"} <= {bar["name"] for bar in bars}
    assert [row["name"] for row in rows if row["ph"] == "i" and row["name"].startswith("batch")] == [
        f"batch {step}" for step in range(3)
    ]


def test_a_run_that_goes_on_and_one_that_was_killed(going_on: Path, tmp_path: Path) -> None:
    check_structure(exported(going_on, tmp_path / "running.json.gz"))

    copy = tmp_path / "killed"
    shutil.copytree(going_on / FOLDER, copy / FOLDER)  # as SIGKILL would leave it: whole records, then nothing
    for path in (copy / FOLDER).iterdir():
        path.write_bytes(path.read_bytes()[:-5])
    rows = exported(copy, tmp_path / "killed.json")
    check_structure(rows)
    assert [row for row in rows if row["ph"] == "X" and row["args"].get("unfinished")]


def test_a_long_one(tmp_path: Path) -> None:
    write_trace(tmp_path, 20_000)
    check_structure(exported(tmp_path, tmp_path / "trace.json"))


def test_what_a_dead_process_had_open_ends_with_it(tmp_path: Path) -> None:
    server = Trace(tmp_path, "env_server", 0, 0, "full")
    supervisor = Trace(tmp_path, "supervisor", 0, 0, "full")
    server.add(ResetBegan(5))
    server.add(Requested(6, 1, 10))  # its beginning is lost
    supervisor.add(ProcessDied("env_server", 0, 0, "killed by SIGKILL"))
    supervisor.add(AlarmShown("process-died", "env_server.0"))

    rows = exported(tmp_path, tmp_path / "trace.json")
    check_structure([row for row in rows if row["ph"] != "s"])
    bars = {row["name"]: row for row in rows if row["ph"] == "X"}
    assert bars.keys() == {"ticket 5", "reset", "generate"}
    assert all(bar["args"]["unfinished"] for bar in bars.values())
    assert [row["name"] for row in rows if row["ph"] == "i"] == ["env_server.0 died", "alarm process-died"]


def test_no_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(tmp_path)]) == 2
    assert "has no trace" in capsys.readouterr().err
    assert main(["top", str(tmp_path)]) == 2
    assert "no folder of a run" in capsys.readouterr().err


def test_top_of_a_run_without_a_trace(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("tracking.trace=off")
    assert main(["top", str(run.folder), "--once"]) == 2
    assert "tracking.trace=off" in capsys.readouterr().err


# ------------------------------------------------------------ fresco top


def test_a_frame_says_what_each_process_does(played: Path) -> None:
    done = subprocess.run(command("top", str(played)), capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for part in ("step 3/3", "ended: finished", "reward", "staleness", "tokens/s", "learner.1", "generator.0", "CPU"):
        assert part in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80 and len(done.stdout.splitlines()) <= 24


def test_open_spans_and_the_newest_incarnation_are_shown(make_run: MakeRun) -> None:
    run = make_run()
    Trace(run.folder, "learner", 0, 0, "steps").add(SpanBegan("wait broker", 1))
    second = Trace(run.folder, "learner", 0, 1, "steps")
    second.add(SpanBegan("publish", 1))
    second.add(SpanBegan("wait slot", 1))
    watch = Watch(run.folder)

    def learner() -> str:
        watch.read_on()
        (name,) = [each for each in watch.newest() if each.source.role == "learner"]
        return name.does(time.monotonic())

    assert learner().startswith("wait slot, ")
    second.add(SpanEnded("wait slot", 1))
    assert learner().startswith("publish, ")
    second.add(SpanEnded("publish", 1))
    second.add(Pulse(False, 1, 0.5, {}, {}))
    assert learner() == "idle"


def test_it_watches_a_run_that_goes_on_until_q(going_on: Path) -> None:
    leader, terminal = pty.openpty()
    shown = b""
    watcher = subprocess.Popen(
        command("top", str(going_on)), stdin=terminal, stdout=terminal, stderr=terminal, cwd=ROOT
    )
    os.close(terminal)
    deadline = time.monotonic() + 240

    try:
        while shown.count(b"learner.0") < 2:
            assert watcher.poll() is None and time.monotonic() < deadline, shown[-2000:]
            shown += _read(leader)
        assert b"ended" not in shown
        os.write(leader, b"q")
        while watcher.poll() is None:
            assert time.monotonic() < deadline
            _read(leader)
        assert watcher.returncode == 0
    finally:
        watcher.kill()
        watcher.wait()
        os.close(leader)


def _read(terminal: int) -> bytes:
    ready, _, _ = select.select([terminal], [], [], 0.1)
    with contextlib.suppress(OSError):  # its other end is closed
        return os.read(terminal, 65536) if ready else b""
    return b""


def test_a_run_whose_supervisor_was_killed_has_ended(make_run: MakeRun) -> None:
    run = make_run()
    code = "import sys; from pathlib import Path; from rl.observe.trace import Trace; "
    code += "Trace(Path(sys.argv[1]), 'supervisor', 0, 0, 'full')"
    subprocess.run([sys.executable, "-c", code, str(run.folder)], check=True, timeout=240)
    watch = Watch(run.folder)
    watch.read_on()
    assert watch.ended == "killed"

"""Tracking: what was logged can be read back, in metrics.jsonl and in wandb's offline file. No run ends by it."""

from __future__ import annotations

import json
import struct
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, cast

import pytest

from launch.boards import check_boards
from launch.dashboard import BoardThread, charts, continued_id, open_dashboard, wandb_mode
from rl.config.schema import ConfigError, load_config
from rl.observe.tracking import Dashboard, Tracker
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.test_end_to_end_simulated import finish, metrics_rows, start


def records(data: bytes) -> list[Any]:
    """Records of a .wandb file: 7-byte header, LevelDB-style 32 KiB blocks, protobuf."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2  # its names are made when it is imported
    found = []
    position = 7
    partial = b""

    while position + 7 <= len(data):
        left_in_block = 32768 - position % 32768
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        if left_in_block < 7 or kind == 0:
            position += left_in_block
            continue

        partial += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # full, or last part
            record = protocol.Record()
            record.ParseFromString(partial)
            partial = b""
            found.append(record)
    return found


def written(run: Path) -> list[Any]:
    (path,) = run.glob("wandb/offline-run-*/run-*.wandb")
    return records(path.read_bytes())


def history_rows(run: Path) -> list[dict[str, Any]]:
    rows = []
    for record in written(run):
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return rows


def offline(make_run: MakeRun) -> RunFile:
    return make_run("tracking.wandb=offline", "name=drawn")


def test_rows_reach_jsonl_and_nan_is_null(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, Dashboard())
    tracker.log(3, {"train/loss": 0.5, "x": float("nan")}, {"staleness": [0.0, float("inf"), 1.0]})
    assert tracker.close(240)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 3 and row["train/loss"] == 0.5 and row["x"] is None and row["staleness"] == [0.0, 1.0]


def test_wandb_keeps_rows_whose_step_goes_backwards(make_run: MakeRun) -> None:
    """With wandb's implicit step such rows vanish silently; ours carry their step as a metric."""
    run = offline(make_run)
    tracker = Tracker(run.folder, open_dashboard(run))
    tracker.log(5, {"train/loss": 0.5, "generator.0/tokens": 3.0}, {"histogram/length": [0.0, 1.0, 1.0]})
    tracker.log(4, {"loss/entropy": 0.25})
    tracker.alert("judge-never", "no answer succeeds")
    assert tracker.close(240) and tracker.dashboard.describe() == {"dropped": 0, "failed": 0, "error": ""}

    rows = history_rows(run.folder)
    assert [row["step"] for row in rows] == [5, 4]
    assert rows[0]["train/loss"] == 0.5 and rows[1]["loss/entropy"] == 0.25
    assert "histogram/length" in rows[0] and "generator.0/tokens" not in rows[0]
    (alert,) = [record.alert for record in written(run.folder) if record.HasField("alert")]
    assert (alert.title, alert.text) == ("judge-never", "no answer succeeds")


def test_a_resumed_run_goes_on_in_its_wandb_run(make_run: MakeRun) -> None:
    first = offline(make_run)
    open_dashboard(first).close(None)
    (id_,) = {record.run.run_id for record in written(first.folder) if record.HasField("run")}

    checkpoint = first.folder / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    resumed = make_run("tracking.wandb=offline", f"resume={checkpoint}")
    open_dashboard(resumed).close(None)
    assert {record.run.run_id for record in written(resumed.folder) if record.HasField("run")} == {id_}
    assert continued_id(None) != id_, "another run is another one"


def test_a_run_is_drawn_with_its_conversations(tmp_path: Path) -> None:
    """The real system: names in groups, few of them, and a table of what was said at each evaluation."""
    summary = finish(start(tmp_path, "tracking.wandb=offline", "tracking.samples=1", "steps=8"), tmp_path)
    assert summary["dashboard"] == {"dropped": 0, "failed": 0, "error": ""}
    run = tmp_path / "simulated"
    rows = history_rows(run)

    names = {name for row in rows for name in row if not name.startswith("_")} - {"step"}
    assert all("/" in name for name in names) and len(names) <= 50
    assert {"speed/tokens_per_second", "eval/env/turns", "histogram/reward", "rollout/reward"} <= names
    assert {name.partition("/")[0] for name in names}.isdisjoint({"generator.0", "wait", "queue"})
    assert any("eval/env/turns" in row for row in metrics_rows(tmp_path))

    artifacts = [
        record.request.log_artifact.artifact for record in written(run) if record.request.HasField("log_artifact")
    ]
    artifacts += [record.artifact for record in written(run) if record.HasField("artifact")]
    assert "report" in [artifact.type for artifact in artifacts]
    assert (run / "report.html").stat().st_size > 10_000

    tables = list(run.glob("wandb/offline-run-*/files/media/table/samples/*.json"))
    (_, last) = sorted((json.loads(path.read_text()) for path in tables), key=lambda table: len(table["data"]))
    assert {row[0] for row in last["data"]} == {"train", "eval"} and len(last["data"]) == 16
    assert all(row[last["columns"].index("conversation")] for row in last["data"])


def test_process_counters_are_not_drawn() -> None:
    row = {"wait/learner.0/broker": 1.0, "proxy.0/live.1": 2.0, "queue/running": 1.0, "train/loss": 0.5}
    row |= {"staleness/3": 0.5, "staleness/mean": 1.0, "stale_1/ess": 1.0, "stale_1/ratio_p01": 1.0}
    assert charts(row) == {"train/loss": 0.5, "staleness/mean": 1.0, "stale_1/ess": 1.0}


def test_names_are_keys_for_every_dashboard() -> None:
    """Users give names to rewards and members of a mixture; a list of keys is divided at commas and blanks."""
    row = {"reward/exact, then places": 0.5, "eval/word problems": 0.25, "train/loss": 1.0}
    assert charts(row) == {"reward/exact_then_places": 0.5, "eval/word_problems": 0.25, "train/loss": 1.0}


def test_wandb_is_told_whose_run_it_is_and_what_for(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    told = ["tracking.entity=team", "tracking.group=alphas", "tracking.tags=[tiny, first]", "tracking.notes=why not"]
    run = make_run("tracking.wandb=offline", *told)
    open_dashboard(run).close(None)
    (record,) = [record.run for record in written(run.folder) if record.HasField("run")]
    assert (record.entity, record.run_group, [*record.tags], record.notes) == (
        "team",
        "alphas",
        ["tiny", "first"],
        "why not",
    )


class Writer:
    """In the place of tensorboardX's, which is no part of this installation."""

    made: ClassVar[list[Writer]] = []

    def __init__(self, logdir: str) -> None:
        self.logdir = logdir
        self.calls: list[tuple[Any, ...]] = []
        self.made.append(self)

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.calls.append((tag, scalar_value, global_step))

    def add_histogram(self, tag: str, values: list[float], global_step: int) -> None:
        self.calls.append((tag, values, global_step))

    def add_text(self, tag: str, text_string: str, global_step: int | None = None) -> None:
        self.calls.append((tag, text_string))

    def close(self) -> None:
        self.calls.append(("closed",))


def test_tensorboard_and_trackio_beside_wandb(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    tensorboard: Any = ModuleType("tensorboardX")
    tensorboard.SummaryWriter = Writer
    trackio: Any = ModuleType("trackio")
    calls: list[tuple[str, Any]] = []
    trackio.init = lambda **told: calls.append(("init", told))
    trackio.log = lambda values, step: calls.append(("log", (values, step)))
    trackio.finish = lambda: calls.append(("finish", None))
    monkeypatch.setitem(sys.modules, "tensorboardX", tensorboard)
    monkeypatch.setitem(sys.modules, "trackio", trackio)

    run = make_run("tracking.wandb=disabled", "tracking.boards=[tensorboard, trackio]", "tracking.group=alphas")
    (run.folder / "metrics.jsonl").write_text('{"step": 4, "time": 1.0, "train/loss": 0.75}\n')  # of a sitting before
    dashboard = open_dashboard(run)
    dashboard.log(5, {"train/loss": 0.5, "wait/x": 1.0}, {"length": [1.0, 2.0], "none": []})
    dashboard.alert("judge-never", "no answer succeeds")
    dashboard.close(None)
    assert dashboard.describe() == {"dropped": 0, "failed": 0, "error": ""}

    (writer,) = Writer.made
    assert writer.logdir == str(run.folder / "tensorboard")
    rows = [("train/loss", 0.75, 4), ("train/loss", 0.5, 5), ("histogram/length", [1.0, 2.0], 5)]
    assert writer.calls == [
        *rows,
        ("alarms/judge-never", "no answer succeeds"),
        ("closed",),
    ]
    (init, told), *rest = calls
    assert init == "init" and (told["project"], told["name"], told["group"]) == ("fresco", "run", "alphas")
    assert told["resume"] == "allow" and rest == [("log", ({"train/loss": 0.5}, 5)), ("finish", None)]


@pytest.mark.parametrize(("board", "library"), [("tensorboard", "tensorboardX"), ("trackio", "trackio")])
def test_a_library_that_is_missing_is_named_before_anything_starts(
    board: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launch.boards.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=f"^tracking.boards={board}: {library} is not installed; pip install {library}"
    ):
        check_boards(load_config(None, [f"tracking.boards=[{board}]"]))


def test_a_dashboard_that_hangs_drops_and_counts(tmp_path: Path) -> None:
    never = threading.Event()

    def hang() -> Any:
        never.wait()
        raise TimeoutError

    dashboard = BoardThread(hang, tmp_path, most_waiting=10)
    tracker = Tracker(tmp_path, dashboard)
    for step in range(100):
        tracker.log(step, {"train/loss": 0.5})

    assert not tracker.close(0.2)
    assert dashboard.describe() == {"dropped": 90, "failed": 0, "error": ""}
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 100
    never.set()


class Refusing:
    def log(self, step: int, values: dict[str, float], histograms: dict[str, list[float]]) -> None:
        raise ConnectionError("away")

    def finish(self) -> None: ...


def test_a_dashboard_that_fails_fails_no_run(tmp_path: Path) -> None:
    def away() -> Any:
        raise OSError("no network")

    for open_run, expected in (
        (away, {"dropped": 1, "failed": 0, "error": "OSError: no network"}),
        (Refusing, {"dropped": 0, "failed": 1, "error": "ConnectionError: away"}),
    ):
        dashboard = BoardThread(cast(Any, open_run), tmp_path)
        dashboard.log(1, {"train/loss": 0.5}, {})
        dashboard.close(None)
        assert dashboard.describe() == expected
        tracker = Tracker(tmp_path, dashboard)
        assert tracker.failure() == expected["error"] and tracker.failure() == "", "it is told once"


@pytest.mark.parametrize(
    ("asked", "key", "mode"), [("auto", "", "offline"), ("auto", "k", "online"), ("disabled", "k", "disabled")]
)
def test_wandb_is_offline_without_an_account(
    asked: str, key: str, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert wandb_mode(asked) == mode

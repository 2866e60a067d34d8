"""Tracking: what was logged can be read back, in metrics.jsonl and in wandb's own offline file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from rl.core.config import TrackingConfig
from rl.core.tracking import Tracker, wandb_mode


def history_rows(data: bytes) -> list[dict[str, object]]:
    """History records of a .wandb file: 7-byte header, LevelDB-style 32 KiB blocks, protobuf records."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2  # its names are made when it is imported
    rows = []
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
            if record.HasField("history"):
                items = record.history.item
                rows.append({item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_rows_reach_jsonl_and_nan_is_null(tmp_path: Path) -> None:
    tracker = Tracker(TrackingConfig(wandb="disabled"), tmp_path, "run", {})
    tracker.log(3, {"train/loss": 0.5, "x": float("nan")}, {"staleness": [0.0, 1.0]})
    assert tracker.close(30)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["step"] == 3 and row["train/loss"] == 0.5 and row["x"] is None and row["staleness"] == [0.0, 1.0]


def test_wandb_keeps_rows_whose_step_goes_backwards(tmp_path: Path) -> None:
    """With wandb's implicit step such rows vanish silently; ours carry their step as a metric."""
    tracker = Tracker(TrackingConfig(wandb="offline"), tmp_path, "run", {"a": 1})
    tracker.log(5, {"train/loss": 0.5}, {"staleness": [0.0, 1.0, 1.0]})
    tracker.log(4, {"eval/accuracy": 0.25})
    assert tracker.close(30)
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    rows = history_rows(path.read_bytes())
    assert [row["step"] for row in rows] == [5, 4]
    assert rows[0]["train/loss"] == 0.5 and rows[1]["eval/accuracy"] == 0.25


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

"""A run that is resumed with other data: refused before anything starts, or it takes them from their first row."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from rl.store.checkpoint_folder import latest, read_journal
from tests.launch.simulated_run import ROOT, simulated_run
from tests.test_end_to_end_simulated import SAMPLE_STATES


@pytest.mark.docs
def test_other_data_are_refused_or_begin_with_their_first_row(tmp_path: Path) -> None:
    first = simulated_run(tmp_path / "first")
    checkpoint = latest(first / "checkpoints")
    assert checkpoint is not None
    before = msgspec.msgpack.decode(read_journal(checkpoint))
    assert before["tasks"]["source"] >= 3 * 4 and before["tasks"]["next_group"] >= 3 * 4

    changed = ["env.options.tasks=50", f"resume={checkpoint}", f"runs={tmp_path / 'second'}", "steps=6"]
    command = [sys.executable, "-m", "launch.cli", "run", "experiments/simulated.yaml", *changed]
    refused = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("fresco: ")]
    named = f"fresco: resume='{checkpoint}': synthetic was trained on 1000 tasks"
    assert refused.returncode == 2 and line.startswith(named)
    assert re.search(r"digest \w{12}, and has 50 tasks, digest \w{12}; give it the same, or set resume_data=new", line)
    assert not (tmp_path / "second" / "simulated").exists()

    second = simulated_run(tmp_path / "second", *changed[:2], "steps=6", "resume_data=new")
    summary = json.loads((second / "summary.json").read_text())
    samples = summary["ledger"]["samples"]
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES) and samples["trained"] == 6 * 4 * 4
    assert not summary["alarms"]
    after = msgspec.msgpack.decode(read_journal(latest(second / "checkpoints") or checkpoint))
    assert after["data"] == json.loads((second / "run.json").read_text())["data"] != before["data"]
    assert after["tasks"]["trained_before"] == 3 * 4
    assert after["tasks"]["next_group"] - before["tasks"]["next_group"] == after["tasks"]["source"]

    # These are its own by now: it goes on with them, whatever stands on the command line.
    on = [f"resume={latest(second / 'checkpoints')}", "steps=9", "resume_data=new"]
    third = simulated_run(tmp_path / "third", changed[0], *on)
    last = msgspec.msgpack.decode(read_journal(latest(third / "checkpoints") or checkpoint))
    assert last["tasks"]["source"] > after["tasks"]["source"] and last["n"] == 9

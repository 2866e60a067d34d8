"""What must hold when a run has ended, whatever happened to it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from rl.store.batch_files import read_batch_parts

_SAMPLES = ["queued", "running", "waiting", "batched", "trained", "stale", "filtered", "settled", "redundant", "failed"]
_TOKENS = [*_SAMPLES[1:], "lost"]


def violations(run: Path, last_step: int, code: int) -> list[str]:
    """The violations of the run in this folder, a line each."""
    if not (run / "summary.json").exists():
        return [f"the run ended with code {code} and without a summary"]
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())

    found = [f"exit code {code}: {summary.get('error', '')}"] if code else []
    reached = summary["start_step"] + summary["steps"]
    if reached != last_step:
        found.append(f"step {reached} of {last_step} was reached")
    if summary["freshness_violations"] != 0:
        found.append(f"freshness_violations is {summary['freshness_violations']}")
    return found + _ledger(summary["ledger"]) + _samples(run)


def _ledger(ledger: dict[str, dict[str, int]] | None) -> list[str]:
    if ledger is None:
        return ["there is no ledger"]
    books = [("samples", "issued", _SAMPLES), ("tokens", "generated", _TOKENS)]
    sums = {book: sum(ledger[book][end] for end in ends) for book, _, ends in books}
    return [
        f"{ledger[book][begun]} {book} were {begun}, {sums[book]} are accounted for"
        for book, begun, _ in books
        if ledger[book][begun] != sums[book]
    ]


def _samples(run: Path) -> list[str]:
    """The faults in what was trained (`tracking.replay=full`): the batch of a step is the same for all ranks."""
    rows = {batch_part.step: batch_part.rows for batch_part in read_batch_parts(run)}
    times = Counter(row.sample_id for batch in rows.values() for row in batch)
    return [f"sample {sample} was trained in {count} steps" for sample, count in times.items() if count > 1]


def left_behind(processes: set[psutil.Process], run_ids: set[str], temporary: Path, gone_s: float = 5.0) -> list[str]:
    """`processes`: all that the run ever had, for which `gone_s` are left to end; `run_ids`: of the run's parts;
    `temporary`: its TMPDIR.
    """
    _, alive = psutil.wait_procs(processes, timeout=gone_s)
    shared = [path.name for path in Path("/dev/shm").iterdir() if any(run_id in path.name for run_id in run_ids)]
    files = [path.name for path in temporary.iterdir()]
    kinds = {"processes": [process.pid for process in alive], "shared memory": shared, "temporary files": files}
    return [f"{kind} left behind: {what}" for kind, what in kinds.items() if what]

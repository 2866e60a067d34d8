"""The same setting in the complete asynchronous system: vLLM, broker, FSDP learner; staleness is what alpha gives."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments.staleness.harness import CURVES
from experiments.staleness.records import RECIPE, Record, setting

SYSTEM_CURVES = CURVES | {"reward": "rollout/reward"}
DEADLINE_S = 1200
PATIENCE = ("timeouts.start_s=600", "timeouts.hang_s=300")  # engines start slowly beside other work


def run_system(loss: str, alpha: float, seed: int, model: Path | None = None) -> Record:
    """`fresco run` of the recipe with this loss and alpha. Raises RuntimeError when it does not finish."""
    before = _children_cpu_s()
    with tempfile.TemporaryDirectory(prefix="staleness-") as runs:
        overrides = [
            f"rollout.alpha={alpha:g}",
            f"algo.loss={loss}",
            f"seed={seed}",
            f"runs={runs}",
            "name=system",
            *PATIENCE,
        ]

        overrides += [f"model.path={model}"] if model else []
        command = [sys.executable, "-m", "launch.cli", "run", str(RECIPE), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr}")
        lines = (Path(runs) / "system" / "metrics.jsonl").read_text().splitlines()

    evals, curves = read_metrics(json.loads(line) for line in lines)
    cpu_s = round(_children_cpu_s() - before, 1)

    return Record(loss, alpha, seed, True, setting(), "finished", cpu_s, evals, curves)


def read_metrics(rows: Iterable[dict[str, Any]]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """(held-out accuracy by step, curves) of a run's `metrics.jsonl`."""
    evals: dict[str, float] = {}
    curves: dict[str, list[float]] = {name: [] for name in SYSTEM_CURVES}
    for row in rows:
        if "eval/accuracy" in row:
            evals[str(row["step"])] = round(row["eval/accuracy"], 4)
        if "loss/ess" in row:
            for name, metric in SYSTEM_CURVES.items():
                curves[name].append(float(f"{row[metric]:.4g}"))

    return evals, curves


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime

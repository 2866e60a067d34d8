"""The complete system on ALFWorld's real engine with real vLLM, at reduced size: both launch recipes, on CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.test_end_to_end_simulated import SAMPLE_STATES, TOKEN_STATES

ROOT = Path(__file__).parent.parent
TINY = [
    "device=cpu",
    "model.path=tiny",
    "model.dtype=float32",
    "generator.dtype=float32",
    "model.tiny={hidden_size: 64, layers: 2, heads: 2, kv_heads: 1, head_dim: 32, ffn_size: 128}",
    "generator.options.kv_cache_bytes=67108864",
    "generator.max_num_seqs=32",
    "learner.max_tokens_per_pack=2048",
    "learner.lr=3e-4",
    "learner.warmup_steps=1",
    "timeouts.start_s=240",
    "tracking.wandb=offline",
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(recipe: str, folder: Path, cache: Path, *overrides: str) -> tuple[str, dict[str, Any]]:
    """Output and summary of a complete run."""
    command = [sys.executable, "-m", "launch.cli", "run", f"experiments/{recipe}", f"runs={folder}", "name=run"]
    done = subprocess.run(
        [*command, *TINY, *overrides],
        cwd=ROOT,
        env=os.environ | {"FRESCO_CACHE": str(cache)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=800,
    )

    assert done.returncode == 0, done.stdout[-5000:]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    samples, tokens = (summary["ledger"][unit] for unit in ("samples", "tokens"))
    assert samples["issued"] == sum(samples[state] for state in SAMPLE_STATES)
    assert tokens["generated"] == sum(tokens[state] for state in TOKEN_STATES)
    assert summary["freshness_violations"] == 0

    return done.stdout, summary


@pytest.mark.docs
def test_the_laptop_recipe_imitates_then_trains_on_many_turns(tmp_path: Path, cache: Path) -> None:
    output, summary = run(
        "alfworld_cpu.yaml",
        tmp_path,
        cache,
        "env.options.games={train: 24, valid_seen: 0, valid_unseen: 8, task_types: [look_at_obj_in_light], "
        "max_receptacles: 4, clutter: [2, 4]}",
        "model.warm_start={demonstrations: 48, steps: 60, batch: 16}",
        "rollout.filter_constant_groups=false",
        "rollout.first_episodes=0",
        "rollout.groups_per_batch=2",
        "rollout.group_size=4",
        "steps=3",
        "eval.tasks=8",
        "env.max_turns=10",
    )

    losses = [float(loss) for loss in re.findall(r"step \d+/60  loss ([\d.]+)", output)]
    assert losses[-1] < 0.7 * losses[0]  # of the imitation: it learned to write commands
    assert summary["steps"] == 3 and summary["ledger"]["samples"]["trained"] == 24
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    turns = [row["rollout/turns"] for row in rows if "rollout/turns" in row]
    assert turns and max(turns) > 1

    evaluated = [json.loads(line) for line in (tmp_path / "run" / "evals.jsonl").read_text().splitlines()]
    assert {row["version"] for row in evaluated} == {0, 3} and len(evaluated) == 16
    assert all(row["success"] in (0, 1) for row in evaluated)


@pytest.mark.docs
def test_the_eight_gpu_topology_at_reduced_size(tmp_path: Path, cache: Path) -> None:
    """Several generators, ranks and environment servers, redundant environments, tagged actions, listed commands."""
    _output, summary = run(
        "alfworld_8gpu.yaml",
        tmp_path,
        cache,
        "env.options.games={train: 24, valid_seen: 0, valid_unseen: 8, task_types: [look_at_obj_in_light], "
        "max_receptacles: 4, clutter: [2, 4]}",
        "model.warm_start={demonstrations: 24, steps: 30, batch: 8}",
        "generator.count=2",
        "learner.ranks=2",
        "env.servers=2",
        "env.episodes_per_server=12",
        "env.options.workers=1",
        "env.max_turns=4",
        "steps=2",
        "rollout.groups_per_batch=4",
        "rollout.group_size=3",
        "rollout.redundant_groups=1",
        "rollout.redundant_episodes=1",
        "rollout.filter_constant_groups=false",
        "sampling.max_tokens=16",
        "generator.max_model_len=1024",
        "generator.options.enforce_eager=true",
        "eval.tasks=8",
    )

    samples = summary["ledger"]["samples"]
    assert samples["trained"] == 24 and samples["issued"] > 24

"""A maths run with real engines and ranks on four machines trains what it trains on one, whoever brings the agents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.machines import Machines, missing
from rl.store.batch_files import read_batch_parts
from rl.store.made_once import cache_folder
from tests.made_before import make_arithmetic_model
from tests.test_cluster_engines import NO_RAY, NO_SLURM, RAY, RAY_HOME, SLURM, ours, with_ray, with_slurm
from tests.test_machines import PATIENCE_S, ROOT, Run, wait_for

pytestmark = [
    pytest.mark.docs,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}"),
]
MACHINES = (1, 2, 3, 4)
ALIKE = (
    "steps=3",
    "rollout.alpha=0",
    "sampling.seeded=true",
    "tracking.replay=full",
    "eval.tasks=16",
    "tracking.wandb=disabled",
)
ENGINES = [
    "local",
    pytest.param("slurm", marks=pytest.mark.skipif(not SLURM, reason=NO_SLURM)),
    pytest.param("ray", marks=pytest.mark.skipif(not RAY, reason=NO_RAY)),
]
SEE = {"local": (1, 2), "slurm": MACHINES, "ray": (1,)}
"""The machines that see the head's folders. Others get the model's files from the head."""
STAND = {1: ["learner"], 2: ["generator", "learner"], 3: ["generator"], 4: ["env_server"]}
_ROLES = {"rl.learner.process": "learner", "rollout.generator.process": "generator", "envs.server": "env_server"}


@pytest.fixture(autouse=True, scope="module")
def model() -> None:
    make_arithmetic_model()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run on this machine alone stands."""
    runs = tmp_path_factory.mktemp("alone")
    command = [sys.executable, "-m", "launch.cli", "run", "math_cpu", f"runs={runs}", *ALIKE]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE_S)
    return runs


@pytest.mark.parametrize("engine", ENGINES)
def test_on_four_machines_a_run_without_lag_trains_what_it_trains_on_one(
    engine: str, alone: Path, tmp_path: Path
) -> None:
    needed = {"slurm": [Path(SLURM)], "ray": [RAY_HOME]}.get(engine, [])
    shared = {number: [*needed, *[tmp_path] * (number in SEE[engine])] for number in MACHINES}
    hidden = {number: [cache_folder()] for number in MACHINES if number not in SEE[engine]}

    with Machines(len(MACHINES), shared=shared, hidden=hidden) as machines:
        options: dict[str, Any] = {}
        if engine == "slurm":
            with_slurm(machines, tmp_path)
        elif engine == "ray":
            options = {"python": RAY, "environment": with_ray(machines)}
        run = Run(machines, tmp_path, "math_cpu", *ALIKE, "cluster.lease_s=20", engine=engine, **options)

        wait_for(lambda: "held-out accuracy" in run.log.read_text() or run.head.poll() is not None, run.told)
        assert standing(machines) == STAND, run.told()
        run.end()
        assert all(agent.wait(PATIENCE_S) == 0 for agent in run.agents.values())
        assert not ours(machines)

    assert len(losses(alone)) == 3 and losses(tmp_path) == pytest.approx(losses(alone), rel=1e-4, abs=1e-6)
    for step in range(3):
        assert batch(tmp_path, step) == batch(alone, step) != {}


def test_an_engine_that_does_not_see_the_model_has_it_below_the_adapters_that_it_is_sent(tmp_path: Path) -> None:
    with Machines(4, shared={1: [tmp_path]}, hidden={number: [cache_folder()] for number in (2, 3, 4)}) as machines:
        place = "cluster.place={learner: [1], generator: [2], env_server: [3]}"
        apart = ("generator.count=1", "learner.ranks=1", "model.lora.serve=adapter", "alarms.exact=1e-3", place)
        run = Run(machines, tmp_path, "math_lora_cpu", *ALIKE, *apart, "cluster.lease_s=20")
        summary = run.end()
        assert all(agent.wait(PATIENCE_S) == 0 for agent in run.agents.values())

    rows = [*map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())]
    differences = [row["exact/max"] for row in rows if "exact/max" in row]
    assert summary["steps"] == 3 and len(differences) == 3 and max(differences) < 1e-3


def standing(machines: Machines) -> dict[int, list[str]]:
    """The roles of workers and ranks, by the number that their machine has in the plan."""
    found = {}
    for number in MACHINES:
        lines = "\n".join(machines.processes(number))
        (agent,) = {int(each) for each in re.findall(r"-m launch\.agent .* (\d+)$", lines, re.M)}
        begun = set(re.findall(r"-m ([\w.]+) --run .*--index (\d+)", lines))
        found[agent] = sorted(_ROLES[module] for module, _ in begun if module in _ROLES)
    return found


def losses(runs: Path) -> list[float]:
    rows = map(json.loads, (runs / "math_cpu" / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


def batch(runs: Path, step: int) -> dict[int, list[int]]:
    """Its tokens, by sample."""
    found: dict[int, list[int]] = {}
    for part in (each for each in read_batch_parts(runs / "math_cpu") if each.step == step):
        ends = np.cumsum(part.lengths)
        for member, end, length in zip(part.members, ends, part.lengths, strict=True):
            found.setdefault(part.rows[member].sample_id, []).extend(part.token_ids[end - length : end].tolist())
    return found

"""The head of a run over several machines dies, and another takes its place: within the lease, and later."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from experiments.machines import Machines, missing
from launch.launcher.copies import TIMELINES
from rl.store.checkpoint_folder import steps_of, verify
from rl.store.made_once import cache_folder
from tests.made_before import make_arithmetic_model
from tests.test_machines import Run, wait_for

pytestmark = [
    pytest.mark.docs,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}"),
]
APART = "cluster.place={learner: [2], generator: [3, 4], env_server: [4]}"
AT_HEAD = "cluster.place={learner: [1], generator: [3, 4], env_server: [4]}"
FEWER = "cluster.place={learner: [1, 2], env_server: [3]}"
SIMULATED = ("simulated", "steps=150", "learner.options.step_s=0.1", "learner.checkpoint_every=5")


def copied(folder: Path) -> int:
    """The newest step of which the head holds a checkpoint."""
    return max(steps_of(folder / "checkpoints"), default=0)


def place_of(machines: Machines, number: int, path: Path) -> Path:
    """Where a machine's own path is found from here."""
    seen: Path = machines._folder / str(number) / path.relative_to("/tmp")
    return seen


def steps_trained(folder: Path) -> list[int]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row["step"] for row in rows if "train/loss" in row]


def test_a_head_that_is_back_within_the_lease_finds_its_agents_waiting(tmp_path: Path) -> None:
    with Machines(4, shared={1: [tmp_path], 2: [tmp_path]}) as machines:
        run = Run(machines, tmp_path, *SIMULATED, "cluster.lease_s=20")
        run.wait_for_step(12)
        run.kill_head()
        time.sleep(3)
        run.begin_head(run.folder)
        run.wait_for_step(30)
        summary = run.end()

        assert summary["steps"] == 150 and steps_trained(run.folder) == list(range(1, 151))
        logs = {path.name for path in (run.folder / "logs").iterdir()}
        assert {"broker.0.1.log", "proxy.0.1.log"} <= logs
        again = {name for name in logs if not name.endswith(".0.log")} - {"broker.0.1.log", "proxy.0.1.log"}
        assert not again, "what stood on the machines went on"
        for number, agent in run.agents.items():
            assert agent.wait(60) == 0 and not machines.processes(number)


def test_a_head_that_comes_later_begins_anew_from_its_copy_of_the_newest_checkpoint(tmp_path: Path) -> None:
    """No folder is shared, and ranks stand on another machine than the head's."""
    with Machines(4, shared={1: [tmp_path]}) as machines:
        run = Run(machines, tmp_path, *SIMULATED, APART)
        wait_for(lambda: copied(run.folder) >= 10, run.told)
        run.kill_head()
        for number, agent in run.agents.items():
            assert agent.wait(60) == 3 and not machines.processes(number), "its lease is over"

        run.begin_head(run.folder)
        wait_for(lambda: "it begins anew" in run.log.read_text(), run.told)
        wait_for(lambda: "fresco join" in run.log.read_text(), run.told)
        run.join_all(1, 2, 3, 4)
        summary = run.end()
        assert summary["start_step"] >= 10 and run.step() == 150
        assert sorted(set(steps_trained(run.folder))) == list(range(1, 151))
        assert all(agent.wait(60) == 0 for agent in run.agents.values())


@pytest.mark.parametrize("place", [APART, AT_HEAD], ids=["the learner's", "another's"])
def test_where_the_heads_machine_is_lost_a_run_begins_anew_on_one_that_holds_a_checkpoint(
    tmp_path: Path, place: str
) -> None:
    """The learner's own, or, where that stood on the head's machine, one that has nothing else of it."""
    with Machines(4, shared={1: [tmp_path]}) as machines:
        # On a busy machine agents and head were once silent for longer than the shortest lease.
        run = Run(machines, tmp_path, *SIMULATED, place, "cluster.lease_s=15")
        there = place_of(machines, 2, tmp_path)
        wait_for(lambda: any(copied(folder) >= 10 for folder in there.glob("simulated@2.*")), run.told)
        machines.kill(1)
        for number in (2, 3, 4):
            assert run.agents[number].wait(60) == 3 and not machines.processes(number), "its lease is over"

        (folder,) = there.glob("simulated@2.*")
        newest = copied(folder)
        assert verify(steps_of(folder / "checkpoints")[newest]).step == newest
        run.folder = there / "simulated"
        run.begin_head(tmp_path / folder.name, "network.host=10.77.0.2", "cluster.nodes=3", FEWER, number=2)
        wait_for((run.folder / "agents.key").exists, run.told)
        run.join_all(2, 3, 4)
        summary = run.end()
        assert summary["start_step"] == newest and steps_trained(run.folder) == list(range(newest + 1, 151))
        for number in (2, 3, 4):
            assert run.agents[number].wait(60) == 0 and not machines.processes(number)


def test_without_a_shared_folder_the_ranks_go_on_elsewhere_from_the_checkpoint_that_counts(tmp_path: Path) -> None:
    with Machines(4, shared={1: [tmp_path]}) as machines:
        run = Run(machines, tmp_path, *SIMULATED, APART)
        wait_for(lambda: copied(run.folder) >= 10, run.told)
        machines.kill(2)
        wait_for(lambda: "the ranks begin from checkpoints/step-" in run.log.read_text(), run.told)
        summary = run.end()

        assert summary["steps"] == 150 and run.step() == 150
        assert sorted(set(steps_trained(run.folder))) == list(range(1, 151))
        assert (run.folder / "checkpoints/step-150/meta.json").exists(), "the last one is copied before the end"
        assert not [*run.folder.glob("checkpoints/*.arriving")]
        assert not (run.folder / "logs/generator.0.1.log").exists(), "the engine on machine 3 went on"
        for number in (1, 3, 4):
            assert run.agents[number].wait(60) == 0 and not machines.processes(number)


def test_a_real_learner_goes_on_elsewhere_with_what_it_had_and_its_model_comes_home(tmp_path: Path) -> None:
    """Two ranks on two machines, which have neither the head's folder nor the model; they fetch its weights."""
    make_arithmetic_model()
    hidden = {number: [cache_folder()] for number in (2, 3, 4)}
    shown = ("steps=8", "learner.checkpoint_every=2", "eval.tasks=16", "learner.ranks=2", "tracking.wandb=disabled")
    place = "cluster.place={learner: [2, 4], generator: [3], env_server: [3]}"
    with Machines(4, shared={1: [tmp_path]}, hidden=hidden) as machines:
        run = Run(machines, tmp_path, "math_cpu", *shown, place)
        wait_for(lambda: copied(run.folder) >= 2, run.told)
        machines.kill(4)
        wait_for(lambda: "the ranks begin from checkpoints/step-" in run.log.read_text(), run.told)
        run.end()
        assert run.step() == 8 and verify(steps_of(run.folder / "checkpoints")[8]).timeline >= TIMELINES
        assert (run.folder / "model" / "model.safetensors").exists()

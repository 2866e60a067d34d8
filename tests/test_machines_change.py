"""A run whose learner stands on a machine of its own is changed at the head, and stays so when that machine is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.machines import Machines, missing
from launch.cli import main
from launch.launcher.copies import TIMELINES
from rl.learner.changes import CHANGES
from rl.store.batch_files import read_batch_parts
from rl.store.checkpoint_folder import steps_of, verify
from tests.test_machines import Run, wait_for
from tests.test_machines_head import copied, place_of, steps_trained

pytestmark = [pytest.mark.docs, pytest.mark.skipif(bool(missing()), reason=f"several machines on one box: {missing()}")]
STEPS = 160
PLACE = "cluster.place={learner: [2, 3], generator: [3, 4], env_server: [4]}"
SETTINGS = (f"steps={STEPS}", "learner.options.step_s=0.1", "learner.checkpoint_every=20", "learner.ranks=1")


def test_what_is_set_and_taken_back_at_the_head_is_so_on_every_machine_of_the_learner(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Machines(4, shared={1: [tmp_path]}) as machines:
        run = Run(machines, tmp_path, "simulated", *SETTINGS, "tracking.replay=full", PLACE)
        run.wait_for_step(5)
        assert main(["set", str(run.folder), "learner.lr=1e-5"]) == 0
        assert "learner.lr=1e-05" in capsys.readouterr().out

        wait_for(lambda: copied(run.folder) >= 40, run.told)
        undone = copied(run.folder)
        assert main(["undo", str(run.folder), "--to", str(undone)]) == 0, capsys.readouterr().err
        assert f"version {undone} becomes the newest again, in timeline 1" in capsys.readouterr().out

        rows = run.folder / "metrics.jsonl"
        wait_for(lambda: '"version/timeline":1.0' in rows.read_text().replace(" ", ""), run.told)
        machines.kill(2)
        wait_for(lambda: "the ranks begin from checkpoints/step-" in run.log.read_text(), run.told)
        summary = run.end()

        changes = [json.loads(line) for line in (run.folder / CHANGES).read_text().splitlines()]
        assert [(each["sets"], each["undo"]) for each in changes] == [({"learner.lr": 1e-5}, None), ({}, undone)]
        (there,) = place_of(machines, 3, tmp_path).glob("simulated@3.*")
        assert (there / CHANGES).read_text() == (run.folder / CHANGES).read_text()
        assert verify(steps_of(run.folder / "checkpoints")[STEPS]).timeline >= TIMELINES

        assert summary["steps"] == STEPS and sorted(set(steps_trained(run.folder))) == list(range(1, STEPS + 1))
        samples = [row.sample_id for part in read_batch_parts(run.folder) for row in part.rows]
        assert len(samples) == len(set(samples)) == STEPS * 16, "nothing is trained twice"
        for number in (1, 3, 4):
            assert run.agents[number].wait(60) == 0 and not machines.processes(number)

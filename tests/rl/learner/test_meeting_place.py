"""Where ranks meet: over tcp rank 0 says where, and so does its successor."""

from __future__ import annotations

import pytest

from launch.launcher.local import LocalLauncher
from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from tests.conftest import MakeRun
from tests.copies import begin
from tests.launch.test_supervisor import QUIET, FakeSpec


@pytest.mark.parametrize("transport", ["ipc", pytest.param("tcp", marks=pytest.mark.docs)])
def test_ranks_meet_and_meet_again_after_a_death(make_run: MakeRun, transport: str) -> None:
    run = make_run(*QUIET, f"network.transport={transport}", "learner.ranks=2", "device=cpu")
    run = run.model_copy(update={"socket_folder": run.folder / "ipc"})
    run.socket_folder.mkdir()
    run.save()

    broker = FakeSpec("broker", 0, environment={"FAKE_BROKER": "done2"})
    ranks = [ProcessSpec("learner", rank, "tests.rl.learner.joining_rank") for rank in range(2)]
    assert Supervisor(run, [broker, *ranks], LocalLauncher(run, begin)).execute() == 0
    assert (run.folder / "logs" / "learner.1.1.log").exists()
    met_at_a_file = bool(list(run.folder.glob("ranks-*")))
    assert met_at_a_file == (transport == "ipc")

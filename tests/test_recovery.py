"""A process that dies is replaced in its place: the others go on, and no sample is lost or trained twice."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl.store.batch_files import read_batch_parts
from rollout.broker.tasks import DrawnTask, Oldest
from tests.test_end_to_end_simulated import check_books, finish, pid_of, restarts, start, wait_for_step

MODULES = {
    "broker": "rollout.broker.process",
    "proxy": "rollout.proxy.process",
    "generator": "rollout.generator.process",
    "env_server": "envs.server",
    "learner": "rl.learner.simulated",
}
SLOW = ("tracking.replay=full", "timeouts.heartbeat_s=0.1", "learner.options.step_s=0.1")

IPC: tuple[str, ...] = ()
TCP = ("network.transport=tcp",)


class RaisesOnce(Oldest):
    """A plug-in in the broker, which fails in one process of a run and not in the next."""

    def consume(self, version: int, task: DrawnTask) -> float:
        raised = Path(os.environ["TMPDIR"], "raised")  # the folder of the run's sockets
        if version >= 4 and not raised.exists():
            raised.touch()
            raise RuntimeError("once")
        return super().consume(version, task)


def kill(tmp_path: Path, role: str, incarnation: int = 0) -> None:
    os.kill(pid_of(tmp_path, MODULES[role], incarnation=incarnation), signal.SIGKILL)


def check(summary: dict[str, Any], tmp_path: Path, steps: int, restarted: dict[str, int]) -> None:
    """Books, and who was started again."""
    check_books(summary, steps)
    folder = tmp_path / "simulated"
    assert restarts(tmp_path) == restarted

    batch_parts = list(read_batch_parts(folder))
    trained = {batch_part.step: [row.sample_id for row in batch_part.rows] for batch_part in batch_parts}
    samples = [sample for rows in trained.values() for sample in rows]
    assert len(samples) == len(set(samples)) == steps * 16
    assert {batch_part.timeline for batch_part in batch_parts} == {0}


@pytest.mark.parametrize(
    "transport", [pytest.param(IPC, id="ipc"), pytest.param(TCP, id="tcp", marks=pytest.mark.docs)]
)
def test_broker_and_proxy_are_replaced_while_the_others_go_on(tmp_path: Path, transport: tuple[str, ...]) -> None:
    """Over tcp each successor listens at another port."""
    process = start(tmp_path, "steps=60", "max_restarts=9", *SLOW, *transport)
    wait_for_step(tmp_path, 5)
    kill(tmp_path, "broker")
    wait_for_step(tmp_path, 15)
    kill(tmp_path, "proxy")
    wait_for_step(tmp_path, 25)
    kill(tmp_path, "broker", incarnation=1)  # both at once, and again while they start
    kill(tmp_path, "proxy", incarnation=1)
    kill(tmp_path, "broker", incarnation=2)
    kill(tmp_path, "proxy", incarnation=2)
    check(finish(process, tmp_path), tmp_path, 60, {"broker": 3, "proxy": 3})


def test_an_exception_in_the_broker_is_a_death_like_any_other(tmp_path: Path) -> None:
    process = start(tmp_path, "steps=20", "rollout.priority=tests.test_recovery:RaisesOnce", *SLOW)
    check(finish(process, tmp_path), tmp_path, 20, {"broker": 1})


def test_a_batch_system_that_tells_every_process_to_end_takes_nobody_from_a_run(tmp_path: Path) -> None:
    """The supervisor hears it as well, and ends them all in order; here it does not."""
    process = start(tmp_path, "steps=60", "generator.count=1", "env.servers=1", *SLOW)
    wait_for_step(tmp_path, 5)  # so all of them work, and none still starts
    for pid in [pid_of(tmp_path, module) for module in MODULES.values()]:
        os.kill(pid, signal.SIGTERM)
    check(finish(process, tmp_path), tmp_path, 60, {})


def test_a_job_that_is_ended_as_a_whole_leaves_a_checkpoint_and_its_books(tmp_path: Path) -> None:
    process = start(tmp_path, "steps=1000", *SLOW)
    wait_for_step(tmp_path, 5)
    for each in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # the supervisor was told first, and ends the others
            each.terminate()

    summary = finish(process, tmp_path, code=130)
    assert summary["steps"] >= 5 and summary["freshness_violations"] == 0
    assert [path.name for path in (tmp_path / "simulated" / "checkpoints").iterdir()] == [f"step-{summary['steps']}"]

"""Agents on the nodes of a running Ray cluster (the extra `ray`): one synchronous actor a node, which keeps one agent.

Ray says where there is room and starts them; whether they live is for the leases to say. All data stay on ZeroMQ.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

from launch.launcher.engines import Agents, join_command
from rl.config.schema import ConfigError
from rl.wire.process import die_with_parent

_ENDS_S = 10.0
_ROOT = Path(__file__).parents[2]
_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # in which Ray tells a job what it was submitted with
_NOT_SENT = [".git", ".venv*", "build", "docs", "runs", "tests", "*.png"]


class RayAgents(Agents):
    """Raises ConfigError where Ray is not there, or has no room within `start_s`."""

    def __init__(self, count: int, on_gpus: bool, start_s: float, address: str, key: bytes) -> None:
        try:
            ray: Any = importlib.import_module("ray")
            groups: Any = importlib.import_module("ray.util.placement_group")
        except ModuleNotFoundError:
            raise ConfigError("cluster.engine='ray': Ray is not installed; pip install 'fresco-rl[ray]'") from None

        self._ray = ray
        self._groups = groups
        self._actors: list[Any] = []
        self._ends: list[Any] = []

        try:
            ray.init(address="auto", runtime_env=_code(), log_to_driver=True)
        except ConnectionError as error:
            raise ConfigError(f"cluster.engine='ray': no Ray cluster runs here ({error}); ray start --head") from None

        gpus = sorted((node["Resources"].get("GPU", 0) for node in ray.nodes() if node["Alive"]), reverse=True)
        each = {"CPU": 1} | ({"GPU": gpus[:count][-1]} if on_gpus else {})
        self._group = groups.placement_group([each] * count, strategy="STRICT_SPREAD")

        try:
            ray.get(self._group.ready(), timeout=start_s)
        except ray.exceptions.GetTimeoutError:
            self.close()
            found = f"Ray has no {count} nodes with {each} within timeouts.start_s={start_s:g} s"
            raise ConfigError(f"cluster.nodes={count}: {found}") from None

        strategies = importlib.import_module("ray.util.scheduling_strategies")
        kept = ray.remote(_Machine)
        for number in range(count):
            place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
            resources = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0)}
            actor = kept.options(max_restarts=0, scheduling_strategy=place, **resources).remote()
            self._actors.append(actor)
            self._ends.append(actor.keep.remote(address, number + 1, key))

    def wrong(self) -> str:
        ended, _ = self._ray.wait(self._ends, timeout=0) if self._ends else ([], [])
        for each in ended:
            try:
                return f"an agent ended with exit code {self._ray.get(each)}; see the lines above"
            except Exception as error:  # of Ray, which has many
                return f"an actor ended: {str(error).splitlines()[0]}"
        return ""

    def close(self) -> None:
        if self._ends:
            self._ray.wait(self._ends, num_returns=len(self._ends), timeout=_ENDS_S)
        for actor in self._actors:
            self._ray.kill(actor)
        self._groups.remove_placement_group(self._group)
        self._ray.shutdown()


def _code() -> dict[str, Any]:
    """How the code comes to the nodes. After `ray job submit --working-dir` it is there: Ray takes no second folder."""
    job = json.loads(os.environ.get(_JOB, "{}"))
    if "working_dir" in (job.get("runtime_env") or {}):
        return {}
    return {"working_dir": str(_ROOT), "excludes": _NOT_SENT}


class _Machine:
    """The actor."""

    def keep(self, address: str, machine: int, key: bytes) -> int:
        """Keep an agent, which dies with this process. Returns its exit code."""
        me = os.getpid()
        process = subprocess.Popen(
            join_command(address, machine),
            stdin=subprocess.PIPE,
            preexec_fn=lambda: die_with_parent(me),
            start_new_session=True,
        )
        process.communicate(key)
        return process.returncode

"""What brings an agent to each machine: `cluster.engine`. Nothing else of a run depends on it.

An agent needs the head's address and the key of the agents, which it reads from its standard input.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from pkgutil import resolve_name

from launch.launcher.node_messages import KEY_FILE
from rl.config.schema import ConfigError
from rl.wire.run import RunFile

_ENDS_S = 10.0
_LOOK_S = 5.0  # between two questions to SLURM while agents are waited for
_TURN_S = 0.2  # and while they end
_ROOT = Path(__file__).parents[2]


class Agents:
    """Of an engine that brings none: whoever has the key comes by himself."""

    def wrong(self) -> str:
        """Why no agent will come, in a few words; empty as long as all may."""
        return ""

    def close(self) -> None:
        """The agents have ended; what brought them ends as well."""


class Commands(Agents):
    """One command for each machine, which lasts as long as its agent."""

    def __init__(self, commands: dict[str, list[str]], key: bytes) -> None:
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for host, command in commands.items():
            self._running[host] = process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
            )
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError), process.stdin:
                process.stdin.write(key)

    def wrong(self) -> str:
        for host, process in self._running.items():
            if process.poll() is not None:
                return f"the agent of {host} ended with exit code {process.returncode}; see the lines above"
        return ""

    def close(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_ENDS_S)
            process.kill()
            process.wait()


class SlurmJobs(Agents):
    """One job for each machine (`launch/slurm.sh`), so that losing one touches no other. Where, and how large, sbatch
    reads from its own variables, as SBATCH_PARTITION and SBATCH_GPUS."""

    def __init__(self, count: int, address: str, key: bytes) -> None:
        paths = {"PYTHONPATH": f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
        self._jobs: list[str] = []
        self._asked = time.monotonic()
        for number in range(1, count + 1):
            join = shlex.join(join_command(address, number))
            told = {"FRESCO_JOIN": join, "FRESCO_AGENTS_KEY": key.decode()}

            command = ["sbatch", "--parsable", str(_ROOT / "launch" / "slurm.sh")]
            try:
                begun = subprocess.run(command, env=os.environ | told | paths, capture_output=True, text=True)
            except FileNotFoundError:
                raise ConfigError("cluster.engine='slurm': there is no sbatch here") from None

            if begun.returncode:
                self.close()
                raise ConfigError(f"cluster.engine='slurm': {begun.stderr.strip()}")
            self._jobs.append(begun.stdout.strip().partition(";")[0])

    def wrong(self) -> str:
        if time.monotonic() < self._asked + _LOOK_S:
            return ""
        self._asked = time.monotonic()
        ended = min(set(self._jobs) - self._listed(), default="")
        return f"job {ended} has ended; see fresco-agent-{ended}.log" if ended else ""

    def _listed(self) -> set[str]:
        """Our jobs that SLURM knows; all, where it does not answer."""
        asked = subprocess.run(["squeue", "-h", "-o", "%A"], capture_output=True, text=True)
        return set(self._jobs) & set(asked.stdout.split()) if asked.returncode == 0 else set(self._jobs)

    def close(self) -> None:
        until = time.monotonic() + _ENDS_S
        while self._listed() and time.monotonic() < until:  # their agents have ended, and they end by themselves
            time.sleep(_TURN_S)
        if left := self._listed():
            subprocess.run(["scancel", *left], capture_output=True)


def join_command(address: str, machine: int) -> list[str]:
    """Starts an agent that reads its key from standard input, in a copy of this folder with the same Python."""
    return [sys.executable, "-m", "launch.cli", "join", address, "--key", "-", "--machine", str(machine)]


def begin_agents(run: RunFile, address: str) -> Agents:
    """Bring an agent to each machine of `cluster.nodes`, if that is ours to do."""
    cluster = run.config.cluster
    key = (run.folder / KEY_FILE).read_bytes()
    if cluster.engine == "slurm":
        return SlurmJobs(cluster.count, address, key)
    if cluster.engine == "ray":
        on_ray = resolve_name("launch.launcher.ray_agents:RayAgents")  # only where it is asked for
        agents: Agents = on_ray(cluster.count, run.device == "cuda", run.config.timeouts.start_s, address, key)
        return agents
    if not isinstance(cluster.nodes, list):
        return Agents()

    there = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={shlex.quote(str(_ROOT))} "
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
    joins = {host: shlex.join(join_command(address, number)) for number, host in enumerate(cluster.nodes, 1)}
    return Commands({host: [*ssh, host, there + join] for host, join in joins.items()}, key)

"""What brings an agent to each machine: `cluster.engine`. Nothing else of a run depends on it.

An agent needs the head's address and the key of the agents, which it reads from its standard input.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from pathlib import Path

from launch.launcher.node_messages import KEY_FILE
from rl.wire.run import RunFile

_ENDS_S = 10.0
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


def join_command(address: str, machine: int) -> list[str]:
    """Starts an agent that reads its key from standard input, in a copy of this folder with the same Python."""
    return [sys.executable, "-m", "launch.cli", "join", address, "--key", "-", "--machine", str(machine)]


def begin_agents(run: RunFile, address: str) -> Agents:
    """Bring an agent to each machine of `cluster.nodes`, if that is ours to do."""
    cluster = run.config.cluster
    key = (run.folder / KEY_FILE).read_bytes()
    if not isinstance(cluster.nodes, list):
        return Agents()

    there = f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={shlex.quote(str(_ROOT))} "
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20"]
    joins = {host: shlex.join(join_command(address, number)) for number, host in enumerate(cluster.nodes, 1)}
    return Commands({host: [*ssh, host, there + join] for host, join in joins.items()}, key)

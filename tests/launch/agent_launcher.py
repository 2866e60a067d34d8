"""A launcher of a third party: an agent on each node starts the processes, and is spoken to in lines of JSON.

Here the nodes are two addresses of this machine. `ssh HOST python -m tests.launch.agent_launcher` would reach others.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from launch.launcher.local import descendants, end_descendants
from launch.launcher.protocol import Node, Spec
from rl.wire.process import adopt_orphans
from rl.wire.run import RunFile

LOOK_S = 0.02


class AgentLauncher:
    def __init__(self, run: RunFile) -> None:
        self._agents = [Agent(Node(f"node{number}", f"127.0.0.{1 + number}")) for number in range(2)]

    def place(self, role: str, index: int) -> Node:
        """Broker, proxy and learner stand on the first node, those that there may be many of on the second."""
        return self._agents[role in ("generator", "env_server", "parsers")].node

    def start(self, spec: Spec, node: Node) -> AgentHandle:
        (agent,) = (agent for agent in self._agents if agent.node == node)
        return agent.start(spec)

    def close(self) -> None:
        for agent in self._agents:
            agent.close()


class Agent:
    """The supervisor's side of one."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self._handles: dict[str, AgentHandle] = {}
        command = [sys.executable, "-m", "tests.launch.agent_launcher"]
        # `setsid`: as over ssh, nothing but its standard input ties it to us.
        self._process = subprocess.Popen(["setsid", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._listen, daemon=True).start()

    def start(self, spec: Spec) -> AgentHandle:
        handle = self._handles[spec.name] = AgentHandle(self, spec.name)
        self.say(start=spec.name, command=spec.command(), environment=spec.environment, log=str(spec.log))
        return handle

    def say(self, **words: Any) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(words).encode() + b"\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """It kills what is left, and ends."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            ended = json.loads(line)
            self._handles[ended["name"]].ended(ended["code"])
        for handle in self._handles.values():  # the agent has died, and the kernel has killed its children
            handle.ended(-signal.SIGKILL)


class AgentHandle:
    def __init__(self, agent: Agent, name: str) -> None:
        self._agent = agent
        self._name = name
        self._code: int | None = None
        self._has_ended = threading.Event()

    def poll(self) -> int | None:
        return self._code

    def kill(self) -> None:
        self._agent.say(kill=self._name)

    def wait(self, timeout_s: float) -> int | None:
        self._has_ended.wait(timeout_s)
        return self._code

    def fileno(self) -> int:
        return -1

    def ended(self, code: int) -> None:
        if self._code is None:
            self._code = code
            self._has_ended.set()


def serve() -> None:
    """The agent: until its standard input ends, and then nothing of it is left."""
    adopt_orphans()
    running: dict[str, subprocess.Popen[bytes]] = {}
    begun: dict[str, int] = {}
    waiting = b""
    while True:
        if select.select([0], [], [], LOOK_S)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, waiting = (waiting + read).split(b"\n")
            for words in map(json.loads, lines):
                if "start" in words:
                    running[words["start"]] = process = _start(words)
                    begun[words["start"]] = process.pid
                else:
                    _kill_group(begun[words["kill"]])

        for name, process in list(running.items()):
            if (code := process.poll()) is not None:
                del running[name]
                _kill_group(process.pid)  # who hears of the end may rely on it
                print(json.dumps({"name": name, "code": code}), flush=True)

    end_descendants(spared=set())
    while descendants():
        time.sleep(LOOK_S)


def _kill_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _start(words: dict[str, Any]) -> subprocess.Popen[bytes]:
    own = {"FRESCO_PARENT_PID": str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    with open(words["log"], "wb") as log:
        return subprocess.Popen(
            words["command"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | words["environment"] | own,
            start_new_session=True,
        )


if __name__ == "__main__":
    serve()

"""Processes of the tests begin as copies of one that has imported what takes seconds: else the suite is imports."""

from __future__ import annotations

import multiprocessing

import psutil

from launch.cpu.fork_server import ForkServer
from launch.launcher.local import Command, Files, begin_process

COPIES = multiprocessing.get_context("forkserver")
COPIES.set_forkserver_preload(["torch", "transformers", "torch.distributed.fsdp", "rl.learner.trainer"])
"""Functions in processes that have nothing of the test's own, as with `spawn`."""

_SERVERS: dict[str, ForkServer] = {}  # by module; they end with this process


def begin(command: Command, files: Files) -> psutil.Process:
    """A process of a role, as the launcher begins one."""
    server = _SERVERS.get(command.module)
    if server is None:
        server = _SERVERS[command.module] = ForkServer([command.module], {"OMP_NUM_THREADS": "1"})
    return server.begin(command._replace(imports=(command.module,)), files) or begin_process(command, files)

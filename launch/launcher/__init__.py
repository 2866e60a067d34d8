"""How the processes of a run are started, killed and known to be dead: `protocol.py`, and one file for each way."""

from __future__ import annotations

from launch.launcher.cluster import ClusterLauncher
from launch.launcher.local import Begin, LocalLauncher, begin_process
from launch.launcher.protocol import Launcher
from rl.config.plugins import load_class, make
from rl.wire.run import RunFile

LAUNCHERS = {"local": LocalLauncher}
_NEEDS = ("place", "start", "close")


def check_launcher(name: str) -> None:
    """Raises ConfigError where `launcher` names no class that has what a launcher needs."""
    load_class("launcher", name, LAUNCHERS, _NEEDS)


def make_launcher(run: RunFile, begin: Begin = begin_process) -> Launcher:
    """The one that `launcher` names. `begin`: how the processes of `local` begin. Raises ConfigError."""
    if run.config.cluster.count:
        return ClusterLauncher(run, begin)
    name = run.config.launcher
    if name == "local":
        return LocalLauncher(run, begin)
    made: Launcher = make("launcher", name, LAUNCHERS, _NEEDS, run=run)
    return made

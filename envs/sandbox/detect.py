"""Which backend this machine can run, and one line that says what is missing when it can run none."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Literal

from envs.sandbox.base import Backend, SandboxError, last_line
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.docker import DockerBackend, running_engine

BackendName = Literal["auto", "bubblewrap", "docker"]
_DEBIAN_PACKAGES = {"bwrap": "bubblewrap", "setpriv": "util-linux", "prlimit": "util-linux", "git": "git"}
_NAMESPACE_PROBE = shlex.split("""
    setpriv --reuid=65534 --regid=65534 --clear-groups
    bwrap --unshare-all --unshare-user --disable-userns --ro-bind / / --proc /proc true
""")


def missing_for_bubblewrap() -> str:
    """What the bubblewrap backend lacks here, in one line with the fix; empty when it can run."""
    absent = [tool for tool in _DEBIAN_PACKAGES if shutil.which(tool) is None]
    if absent:
        packages = " ".join(dict.fromkeys(_DEBIAN_PACKAGES[tool] for tool in absent))
        return f"no {', '.join(absent)} on this machine: apt-get install {packages}"

    if os.geteuid() != 0:
        return "mounting overlays needs root: run as root, or use sandbox=docker"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlayfs: modprobe overlay"

    probe = subprocess.run(_NAMESPACE_PROBE, capture_output=True, cwd="/")
    if probe.returncode == 0:
        return ""
    return (
        f"bubblewrap cannot make namespaces ({last_line(probe.stderr)}): allow them with "
        "`sysctl kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0`, and in a "
        "container with CAP_SYS_ADMIN and an unconfined seccomp profile"
    )


def make_backend(name: BackendName = "auto", slots: int = 64, threads: int = 8) -> Backend:
    """The named backend, or the first that works: `slots` sandboxes alive, `threads` commands running at once.

    Raises SandboxError with one line that says what to install.
    """
    missing = "" if name == "docker" else missing_for_bubblewrap()
    if name != "docker" and not missing:
        return BubblewrapBackend(slots, threads)
    if name == "bubblewrap":
        raise SandboxError(f"sandbox=bubblewrap: {missing}")

    engine = running_engine()
    if engine is None:
        what = f"no sandbox can run here: {missing}; or start" if missing else "sandbox=docker: start"
        raise SandboxError(f"{what} a Docker or Podman engine")
    return DockerBackend(engine, slots)

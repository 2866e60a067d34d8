"""Sandboxes from Docker or Podman: one container each, from an image per task as SWE-bench publishes them.

The container runs `sleep`; commands are `exec`ed into it. A time-out kills with `timeout -s KILL` inside, then restarts
the container, which ends every process and keeps the files. The file system is the image's with the engine's own
copy-on-write layer; a folder template is copied in.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import threading
import uuid
from dataclasses import replace

from envs.sandbox.base import Command, Limits, Result, Sandbox, SandboxError, Template, last_line
from envs.sandbox.process import run_command
from envs.sandbox.runtime import HARNESS, HARNESS_FOLDERS

_ENGINES = ("docker", "podman")
# A first start may pull an image.
_ENGINE_DEADLINE_S = 300.0
# What the client has after the command's own deadline.
_GRACE_S = 5.0
_PLAIN_IMAGE = "python:3.11-slim"


def running_engine() -> str | None:
    """`docker` or `podman`, whichever answers; None when no engine runs."""
    for engine in _ENGINES:
        if shutil.which(engine) is None:
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            if subprocess.run([engine, "info"], capture_output=True, timeout=20).returncode == 0:
                return engine
    return None


def create_command(engine: str, name: str, template: Template, limits: Limits) -> list[str]:
    """What starts a container with every limit that the engine can keep."""
    options = f"""
        --detach --name {name} --label fresco-sandbox --network none --init
        --cap-drop ALL --security-opt no-new-privileges --ipc private
        --pids-limit {limits.processes} --memory {limits.memory_bytes} --memory-swap {limits.memory_bytes}
        --ulimit fsize={limits.file_bytes} --ulimit nofile={limits.open_files} --ulimit core=0
        --tmpfs /tmp:size={limits.disk_bytes},mode=1777
    """.split()
    image = template.image or _PLAIN_IMAGE
    return [engine, "run", *options, "--workdir", template.workspace, "--entrypoint", "sleep", image, "infinity"]


def exec_command(engine: str, name: str, template: Template, command: Command, timeout_s: float) -> list[str]:
    """What runs a command in a container, ended there after `timeout_s`."""
    environment = [item for key, value in command.environment.items() for item in ("--env", f"{key}={value}")]
    client = [engine, "exec", "--interactive", "--workdir", template.workspace, *environment, name]
    return [*client, "timeout", "--signal=KILL", f"{timeout_s:.3f}", *command.argv]


class DockerBackend:
    """`slots`: containers alive at once. Raises SandboxError where no engine runs."""

    def __init__(self, engine: str | None = None, slots: int = 64) -> None:
        found = engine or running_engine()
        if found is None:
            raise SandboxError("the docker backend needs a running Docker or Podman engine: start one")
        self.name = self.engine = found
        self._slots = threading.BoundedSemaphore(slots)
        self._live: set[DockerSandbox] = set()

    def open(self, template: Template, limits: Limits) -> Sandbox:
        if not self._slots.acquire(timeout=_ENGINE_DEADLINE_S):
            raise SandboxError(f"no container slot became free within {_ENGINE_DEADLINE_S:.0f} s")
        try:
            sandbox = DockerSandbox(self, template, limits)
        except BaseException:
            self._slots.release()
            raise
        self._live.add(sandbox)
        return sandbox

    def close(self) -> None:
        for sandbox in list(self._live):
            sandbox.close()

    def released(self, sandbox: DockerSandbox) -> None:
        self._live.discard(sandbox)
        self._slots.release()

    def engine_client(self, *arguments: str) -> str:
        """Run the engine's client. Raises SandboxError with the last line it printed."""
        try:
            ended = subprocess.run([self.engine, *arguments], capture_output=True, timeout=_ENGINE_DEADLINE_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{self.engine} {arguments[0]}: {error}") from None
        if ended.returncode != 0:
            raise SandboxError(f"{self.engine} {arguments[0]}: {last_line(ended.stderr)}")
        return ended.stdout.decode(errors="replace")


class DockerSandbox:
    """One container."""

    def __init__(self, backend: DockerBackend, template: Template, limits: Limits) -> None:
        self.limits = limits
        self._backend = backend
        self._template = template
        self._name = f"fresco-{uuid.uuid4().hex[:12]}"
        self._open = True

        _, *arguments = create_command(backend.engine, self._name, template, limits)
        try:
            backend.engine_client(*arguments)
            for folder in HARNESS_FOLDERS:
                backend.engine_client("cp", f"{folder}/.", f"{self._name}:{HARNESS}")
            if template.folder is not None:
                backend.engine_client("cp", f"{template.folder}/.", f"{self._name}:{template.workspace}")
        except BaseException:
            self._remove()
            raise

    def run(self, command: Command) -> Result:
        if not self._open:
            raise SandboxError("this sandbox is closed")

        timeout_s = command.deadline_s(self.limits)
        result = run_command(
            exec_command(self._backend.engine, self._name, self._template, command, timeout_s),
            command.stdin,
            timeout_s + _GRACE_S,
            self.limits.output_bytes,
            separate_stderr=command.separate_stderr,
            environment={"PATH": "/usr/local/bin:/usr/bin:/bin"},
            kill=lambda: None,
        )
        timed_out = result.timed_out or (result.exit_code == 137 and result.seconds >= timeout_s)

        self._end_survivors()
        state = json.loads(self._backend.engine_client("inspect", "--format", "{{json .State}}", self._name))
        return replace(
            result,
            exit_code=137 if timed_out else result.exit_code,
            timed_out=timed_out,
            out_of_memory=bool(state.get("OOMKilled")),
        )

    def close(self) -> None:
        if self._open:
            self._open = False
            self._remove()
            self._backend.released(self)

    def _end_survivors(self) -> None:
        """Restart if anything but the container's own two processes (init, sleep) is left."""
        listed = self._backend.engine_client("top", self._name).strip().splitlines()
        if len(listed) > 3:
            self._backend.engine_client("restart", "--time", "0", self._name)

    def _remove(self) -> None:
        with contextlib.suppress(SandboxError):
            self._backend.engine_client("rm", "--force", "--volumes", self._name)

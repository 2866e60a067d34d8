"""An agent that is a program of its own, such as a harness in its own virtual environment.

It gets the address of the model in its environment: OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL,
ANTHROPIC_API_KEY. It gets the task as JSON on its standard input, and an empty folder as HOME and working folder. The
last line of its output is the outcome as JSON: {"reward": 1.0, "success": true, "rewards": {...}, "info": {...}}.

It runs in a sandbox (`envs/sandbox`): it sees the system's programs, its own virtual environment and its folder, and
can reach the gateway and nothing else. When it ends, or is cancelled, all that it has started is killed, and what it
wrote is dropped. `sandbox=False` (`envs/gateway/unconfined.py`) is for machines that can make none.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from envs import sandbox as sandboxes
from envs.gateway.gate import gate
from envs.gateway.unconfined import run_unconfined
from envs.sandbox import Limits, Sandbox, SandboxError, Template
from envs.sandbox.bubblewrap import BubblewrapSandbox
from envs.sandbox.runtime import HARNESS, default_runtime
from envs.sandbox.service import SandboxService
from rollout.episodes.environment import Endpoint, Outcome

_FIELDS = {"reward", "success", "rewards", "info"}
_PATH = "/usr/local/bin:/usr/bin:/bin"
_TAIL = 500  # characters of what a failed command said
_SLOTS = 256  # programs of one environment server that run at once, a sandbox and a thread each
_STOP_S = 0.1


class CommandFailed(Exception):
    """The program did not answer an outcome; the message says why, in one line."""


@dataclass(frozen=True)
class Command:
    """`arguments` begin with the program, such as a virtual environment's python, whose folder it then sees."""

    arguments: Sequence[str]
    deadline_s: float = 300.0
    memory_bytes: int = 4 << 30
    """The memory of all its processes; without a sandbox of each."""
    file_bytes: int = 1 << 30
    """Largest file."""
    disk_bytes: int = 1 << 30
    """All that it writes."""
    processes: int = 256
    """The number of processes, threads included."""
    output_bytes: int = 1 << 20
    variables: Mapping[str, str] = field(default_factory=dict)
    visible: Sequence[str | Path] = ()
    """Further folders that it may read, at their own paths."""
    sandbox: bool = True

    async def run(self, task: Any, endpoint: Endpoint) -> Outcome:
        """Raises CommandFailed, or SandboxError on a machine that has none. Cancelled, it kills all of it first."""
        given = json.dumps(task).encode()
        if not self.sandbox:
            with tempfile.TemporaryDirectory(prefix="fresco-agent-", ignore_cleanup_errors=True) as folder:
                return _outcome(*await self._run_unconfined(given, endpoint, folder))

        service = await asyncio.to_thread(_service)
        with tempfile.TemporaryDirectory(prefix="fresco-agent-", ignore_cleanup_errors=True) as folder:
            Path(folder).chmod(0o777)
            template = Template(Path(folder), visible=self.visible_folders())
            opened = await service.entered(
                lambda: service.backend.open(template, self.limits()), lambda made: made.close()
            )
            try:
                return _outcome(*await self.run_in(service, opened, given, endpoint))
            finally:
                await asyncio.shield(asyncio.ensure_future(service.run(opened.close)))

    async def run_in(
        self, service: SandboxService, opened: Sandbox, given: bytes, endpoint: Endpoint
    ) -> tuple[int, bytes, bytes]:
        """Exit status, output and errors of the program in a sandbox that is open, with `visible_folders`."""
        assert isinstance(opened, BubblewrapSandbox), "a container has no way to the gateway"
        address = urlsplit(endpoint.base_url)
        inside = Endpoint(f"http://127.0.0.1:{address.port}{address.path}", endpoint.api_key)
        async with gate(endpoint) as folder:
            wanted = sandboxes.Command(
                [default_runtime().python, "-IS", f"{HARNESS}/reach_gateway.py", str(address.port), *self.arguments],
                given,
                environment=self.environment(inside, sandboxes.WORKSPACE),
                separate_stderr=True,
                run_folder=folder,
            )

            running = asyncio.ensure_future(service.run(lambda: opened.run(wanted)))
            try:
                result = await asyncio.shield(running)
            finally:
                while not running.done():
                    await asyncio.to_thread(opened.kill)
                    await asyncio.wait({running}, timeout=_STOP_S)
                running.exception()  # of one that is killed as it starts, nobody else would ask

        if result.timed_out:
            raise CommandFailed(f"it ran past its deadline of {self.deadline_s:g} s")
        if result.out_of_memory:
            raise CommandFailed(f"its processes took more than {self.memory_bytes} bytes")
        return result.exit_code, result.output, result.stderr

    async def _run_unconfined(self, given: bytes, endpoint: Endpoint, folder: str) -> tuple[int, bytes, bytes]:
        try:
            return await run_unconfined(self, given, self.environment(endpoint, folder), folder)
        except TimeoutError:
            raise CommandFailed(f"it ran past its deadline of {self.deadline_s:g} s") from None

    def limits(self) -> Limits:
        """The limits of its sandbox."""
        return Limits(
            timeout_s=self.deadline_s,
            memory_bytes=self.memory_bytes,
            processes=self.processes,
            file_bytes=self.file_bytes,
            disk_bytes=self.disk_bytes,
            output_bytes=2 * self.output_bytes,  # the middle is left out, and the outcome comes last
            open_files=1024,
        )

    def visible_folders(self) -> tuple[Path, ...]:
        """The folders that are named, and the virtual environment whose interpreter the program is."""
        venv = Path(self.arguments[0]).parent.parent
        own = [venv] if (venv / "pyvenv.cfg").is_file() else []
        return tuple(dict.fromkeys([*own, *map(Path, self.visible)]))

    def environment(self, endpoint: Endpoint, folder: str) -> dict[str, str]:
        """The environment of the program; `folder` is its own."""
        given = {
            "PATH": _PATH if self.sandbox else os.environ.get("PATH", _PATH),
            "LANG": "C.UTF-8",
            "HOME": folder,
            "TMPDIR": "/tmp" if self.sandbox else folder,
            "OPENAI_BASE_URL": f"{endpoint.base_url}/v1",
            "OPENAI_API_KEY": endpoint.api_key,
            "ANTHROPIC_BASE_URL": endpoint.base_url,
            "ANTHROPIC_API_KEY": endpoint.api_key,
        }
        return given | dict(self.variables)


_lock = threading.Lock()
_services: list[SandboxService] = []


def _service() -> SandboxService:
    """The service of this process, made at the first call. Raises SandboxError, one line, where no sandbox can run."""
    with _lock:
        if not _services:
            made = SandboxService("bubblewrap", _SLOTS, _SLOTS)
            try:
                made.open()
            except SandboxError as error:
                raise SandboxError(f"{error}; or run the program without one: Command(sandbox=False)") from None
            _services.append(made)  # its mounts and what runs in them end with this process, however it ends
        return _services[0]


def _outcome(status: int, output: bytes, errors: bytes) -> Outcome:
    said = " ".join(errors.decode(errors="replace").split())[-_TAIL:]
    if status != 0:
        raise CommandFailed(f"it ended with status {status}: {said}")

    lines = output.decode(errors="replace").strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not {"reward", "success"} <= found.keys() <= _FIELDS:
        raise CommandFailed(f"the last line of its output is no outcome: {(lines or [''])[-1][:_TAIL]!r}")
    return Outcome(**found)

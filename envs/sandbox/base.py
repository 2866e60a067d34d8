"""What a sandbox is, whatever makes it: a private copy of a file tree in which hostile commands run.

Every backend keeps these invariants:

* the template is never written;
* there is no network;
* nothing of the host is readable but the runtime;
* when `run` returns, no process that it started is alive;
* a sandbox that is closed leaves nothing behind.

Everything that comes out of a sandbox (output, file contents, diffs) is hostile input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WORKSPACE = "/workspace"
"""Where the template's copy stands inside a sandbox, and the working directory of every command."""


class SandboxError(RuntimeError):
    """A sandbox cannot be made or used; one line that says what is missing or went wrong on the host's side."""


@dataclass(frozen=True)
class Limits:
    """The limits of one sandbox, in bytes and seconds."""

    timeout_s: float = 30.0
    """The time of one command, unless the command says less."""
    cpu_s: int | None = None
    """CPU seconds of each of its processes; bubblewrap only. What ends by it ends so on a busy machine as well."""
    memory_bytes: int = 1 << 30
    """The memory of the whole process tree."""
    processes: int = 64
    """The number of processes, threads included."""
    file_bytes: int = 64 << 20
    """Largest file that a command may write."""
    disk_bytes: int = 256 << 20
    """Everything written, /tmp included."""
    output_bytes: int = 64 << 10
    """The bytes that are kept of each stream; the middle is left out."""
    open_files: int = 256


@dataclass(frozen=True)
class Result:
    """What one command left. `output` is stdout with stderr, or stdout alone where `stderr` was kept apart."""

    exit_code: int
    """128 + signal for a command that a signal ended; 137 for one that a limit ended."""
    output: bytes
    stderr: bytes = b""
    left_out_bytes: int = 0
    """The bytes that were left out of the middle of both streams."""
    seconds: float = 0.0
    timed_out: bool = False
    out_of_memory: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and not self.timed_out

    def text(self) -> str:
        return self.output.decode(errors="replace")


@dataclass(frozen=True)
class Template:
    """What a sandbox starts from: a folder (bubblewrap) or an image (Docker, Podman)."""

    folder: Path | None = None
    image: str | None = None
    workspace: str = WORKSPACE
    """Where the repository stands inside an image."""
    visible: tuple[Path, ...] = ()
    """Further folders of the host, read-only at their own paths: a virtual environment. Only bubblewrap has this."""


@dataclass(frozen=True)
class Command:
    """What to run in a sandbox, and within which limits of its own."""

    argv: Sequence[str]
    stdin: bytes = b""
    timeout_s: float | None = None
    """The time of this command; None: the sandbox's limit, which it can never exceed."""
    environment: Mapping[str, str] = field(default_factory=dict)
    separate_stderr: bool = False
    read_only: Sequence[str] = ()
    """Files of the workspace that cannot change while it runs, nor the names of the folders they are in; links are left
    out. Only bubblewrap has this."""
    run_folder: Path | None = None
    """A folder of the host that is shown as /run, read-only: sockets in it can be connected to. Only bubblewrap has
    this."""

    def deadline_s(self, limits: Limits) -> float:
        return min(limits.timeout_s, self.timeout_s or limits.timeout_s)


class Sandbox(Protocol):
    """One private copy of a template."""

    def run(self, command: Command) -> Result:
        """Run a command to its end or its limit. Blocks. Raises SandboxError only for faults of the host."""
        ...

    def close(self) -> None:
        """Kill what runs, drop all changes. It may be called again."""
        ...


class Backend(Protocol):
    """Makes sandboxes, from any thread."""

    name: str

    def open(self, template: Template, limits: Limits) -> Sandbox:
        """A new sandbox on `template`. Blocks while all slots are taken, at most the backend's deadline."""
        ...

    def close(self) -> None:
        """Close every sandbox and release the host's resources. It may be called again."""
        ...


def last_line(stream: bytes) -> str:
    """The last line that a command of the host printed, for an error of one line."""
    lines = stream.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"


def read_file(sandbox: Sandbox, path: str) -> bytes | None:
    """A file as the sandbox's own user sees it; None if it cannot be read or is larger than the output limit."""
    result = sandbox.run(Command(["cat", "--", path], separate_stderr=True))
    return result.output if result.ok and not result.left_out_bytes else None


def write_file(sandbox: Sandbox, path: str, content: bytes) -> bool:
    """Write as the sandbox's own user, so that a link planted inside leads nowhere outside. False: refused."""
    script = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
    return sandbox.run(Command(["sh", "-c", script, "sh", path], stdin=content)).ok

"""Private copies of a file tree in which hostile commands run. `make_backend()` chooses what this machine has."""

from envs.swe.sandbox.base import (
    WORKSPACE,
    Backend,
    Call,
    Limits,
    Result,
    Sandbox,
    SandboxError,
    Template,
    read_file,
    write_file,
)
from envs.swe.sandbox.detect import BackendName, make_backend, missing_for_bubblewrap

__all__ = [
    "WORKSPACE", "Backend", "BackendName", "Call", "Limits", "Result", "Sandbox", "SandboxError", "Template",
    "make_backend", "missing_for_bubblewrap", "read_file", "write_file",
]  # fmt: skip

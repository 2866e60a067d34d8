"""Where a task's repository is, and how a sandbox on it opens: an image's repository is made ready then.

A published image holds the repository as its data set left it: of SWE-smith without the bug, and with a history in
which the fix may stand. The agent's sandbox and the judge's begin alike: the bug applied, and one commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from envs.sandbox import Backend, Command, Limits, Sandbox, SandboxError, Template
from envs.sandbox.runtime import default_runtime

GIT_IDENTITY = {
    "GIT_AUTHOR_NAME": "author", "GIT_AUTHOR_EMAIL": "author@localhost", "GIT_AUTHOR_DATE": "2024-01-01T00:00:00Z",
    "GIT_COMMITTER_NAME": "author", "GIT_COMMITTER_EMAIL": "author@localhost",
    "GIT_COMMITTER_DATE": "2024-01-01T00:00:00Z", "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/nonexistent",
    "GIT_CONFIG_COUNT": "4", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*",
    "GIT_CONFIG_KEY_1": "core.hooksPath", "GIT_CONFIG_VALUE_1": "/dev/null",
    "GIT_CONFIG_KEY_2": "init.defaultBranch", "GIT_CONFIG_VALUE_2": "main",
    "GIT_CONFIG_KEY_3": "gc.auto", "GIT_CONFIG_VALUE_3": "0",  # a packing left in the background would be killed
}  # fmt: skip
_BEGIN_HISTORY = """set -e
find . -name .git -prune -exec rm -rf -- {} +
git init --quiet
[ -z "$1" ] || git apply --whitespace=nowarn -
git add --all --force
git commit --quiet --message "Initial commit"
exec git rev-parse HEAD"""


@dataclass(frozen=True)
class Checkout:
    """Where a task's repository is: the template, the commit it stands at, folders to import from, the Python."""

    template: Template
    base: str
    python_path: tuple[str, ...] = (".",)
    python: str = field(default_factory=lambda: default_runtime().python)
    bug_patch: str | None = None  # applied, perhaps empty, as a sandbox opens; None: the template is ready as it is


def open_checkout(backend: Backend, checkout: Checkout, limits: Limits) -> tuple[Checkout, Sandbox]:
    """A sandbox, and the checkout with the commit it stands at. Blocks.

    Raises SandboxError, also where an image's repository does not take the bug or a commit.
    """
    sandbox = backend.open(checkout.template, limits)
    if checkout.bug_patch is None:
        return checkout, sandbox
    try:
        return replace(checkout, base=_begin_history(sandbox, checkout)), sandbox
    except BaseException:
        sandbox.close()
        raise


def _begin_history(sandbox: Sandbox, checkout: Checkout) -> str:
    """Apply the bug and commit all there is, ignored files too, as the only commit; its hash."""
    patch = checkout.bug_patch or ""
    argv = ["sh", "-c", _BEGIN_HISTORY, "sh", "patch" if patch else ""]
    result = sandbox.run(Command(argv, patch.encode(), environment=GIT_IDENTITY, separate_stderr=True))
    if not result.ok:
        lines = result.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        why = f"took longer than {result.seconds:.0f} s" if result.timed_out else lines[-1]
        where = checkout.template.image or checkout.template.folder
        raise SandboxError(f"{where}: its repository cannot be made ready: {why}")
    return result.text().strip()

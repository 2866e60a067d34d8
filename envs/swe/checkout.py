"""Where a task's repository is, and how a sandbox on it opens: an image's repository is made ready then.

A published image holds the repository as its data set left it: of SWE-smith without the bug, and with a history in
which the fix may stand. The agent's sandbox and that of the tests begin alike: the bug applied, and one commit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from envs.sandbox import Backend, Command, Limits, Sandbox, SandboxError, Template
from envs.sandbox.base import last_line
from envs.sandbox.runtime import default_runtime

_DATE = "2024-01-01T00:00:00Z"
_GIT_CONFIG = {
    "safe.directory": "*",
    "core.hooksPath": "/dev/null",
    "init.defaultBranch": "main",
    # A packing left in the background would be killed.
    "gc.auto": "0",
}
GIT_ENVIRONMENT = {
    "GIT_AUTHOR_NAME": "author",
    "GIT_AUTHOR_EMAIL": "author@localhost",
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": "author",
    "GIT_COMMITTER_EMAIL": "author@localhost",
    "GIT_COMMITTER_DATE": _DATE,
    "GIT_CONFIG_NOSYSTEM": "1",
    "HOME": "/nonexistent",
    "GIT_CONFIG_COUNT": str(len(_GIT_CONFIG)),
    **{f"GIT_CONFIG_KEY_{n}": key for n, key in enumerate(_GIT_CONFIG)},
    **{f"GIT_CONFIG_VALUE_{n}": value for n, value in enumerate(_GIT_CONFIG.values())},
}
"""The variables for commits that are the same wherever and whenever they are made."""
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
    bug_patch: str | None = None
    """The patch that is applied, perhaps empty, as a sandbox opens; None: the template is ready as it is."""


def open_checkout(backend: Backend, checkout: Checkout, limits: Limits) -> tuple[Checkout, Sandbox]:
    """The checkout with the commit it stands at, and a sandbox on it. Blocks.

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
    result = sandbox.run(Command(argv, patch.encode(), environment=GIT_ENVIRONMENT, separate_stderr=True))

    if not result.ok:
        why = f"took longer than {result.seconds:.0f} s" if result.timed_out else last_line(result.stderr)
        where = checkout.template.image or checkout.template.folder
        raise SandboxError(f"{where}: its repository cannot be made ready: {why}")
    return result.text().strip()

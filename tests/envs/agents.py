"""What an agent writes and leaves behind, for the tests of software engineering."""

from __future__ import annotations

from envs.sandbox import Backend, Limits
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.evaluate import MAX_DIFF_CHARS
from envs.swe.tool_calls import ToolCall, render_call
from envs.swe.tools import extract_diff
from tests.envs.sandboxes import sh


def tool_call(name: str, **arguments: object) -> str:
    """A call in a model's text."""
    return render_call(ToolCall(name, dict(arguments)))


def agents_work(backend: Backend, checkout: Checkout, script: str, limits: Limits) -> tuple[Checkout, str]:
    """The checkout of the agent's sandbox, and the diff of what a shell script changes in it."""
    checkout, sandbox = open_checkout(backend, checkout, limits)
    sh(sandbox, script)
    diff = extract_diff(sandbox, checkout.base, MAX_DIFF_CHARS)
    sandbox.close()
    return checkout, diff

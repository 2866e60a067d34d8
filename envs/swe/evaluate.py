"""The reward: a submitted diff, applied in a fresh sandbox, against FAIL_TO_PASS and PASS_TO_PASS.

Nothing of the sandbox in which the agent worked is used but the text of its diff. Tests, their configuration and what
could shadow their tools are put back before anything runs (`harness/apply_diff.py`). A test counts as passed only if
the harness says so, with its random key, at the end of a whole run whose canaries failed. Limit: tests and code under
test share a process, so code written against this very harness could forge its report; code that ends the process,
prints results or patches pytest as a whole cannot.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from envs.sandbox import Backend, Command, Limits, Result, Sandbox
from envs.sandbox.runtime import HARNESS
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.runners import RUNNERS, RunnerName, protected_paths, share_passed
from envs.swe.tasks import SweTask

MAX_DIFF_CHARS = 1_000_000
TEST_LIMITS = Limits(timeout_s=300, memory_bytes=2 << 30, processes=128, disk_bytes=512 << 20, output_bytes=8 << 20)


@dataclass(frozen=True)
class Outcome:
    """What a submitted diff earns. Where `why` says something, nothing counts."""

    fail_to_pass: float
    """Share of these tests that pass now."""
    pass_to_pass: float
    """Share of these tests that still pass."""
    applied: bool
    why: str = ""
    """The diff does not apply, the run did not end, or a canary passed."""
    restored: tuple[str, ...] = ()
    """Paths that were put back before the tests ran."""

    @property
    def resolved(self) -> bool:
        return self.applied and self.fail_to_pass == 1 and self.pass_to_pass == 1

    def reward(self, *, partial: bool) -> float:
        """1 if resolved, else 0; `partial`: the share of FAIL_TO_PASS, if every PASS_TO_PASS still passes."""
        if partial and self.pass_to_pass == 1:
            return self.fail_to_pass
        return float(self.resolved)


@dataclass(frozen=True)
class TestRun:
    """`outcomes` by test id: passed, failed, skipped, xfailed. Empty where `why` says that the run does not count."""

    # Tells pytest that this class holds no tests.
    __test__ = False
    outcomes: dict[str, str] = field(default_factory=dict)
    output: str = ""
    why: str = ""
    seconds: float = 0.0

    def passed(self, tests: Sequence[str]) -> float:
        """Share of `tests` that passed; 1 of none."""
        return share_passed(self.outcomes, tests)


def evaluate(backend: Backend, checkout: Checkout, task: SweTask, diff: str, limits: Limits = TEST_LIMITS) -> Outcome:
    """Blocks for the time of the tests. Raises SandboxError for faults of the host only."""
    if len(diff) > MAX_DIFF_CHARS:
        return Outcome(0, 0, applied=False, why=f"the diff has {len(diff)} characters, more than {MAX_DIFF_CHARS}")

    checkout, sandbox = open_checkout(backend, checkout, limits)
    try:
        machinery = protected_paths(task.runner, task.gold_patch)
        applied = apply_diff(sandbox, checkout, diff, task.test_patch, machinery)
        if not applied["applied"]:
            return Outcome(0, 0, applied=False, why=f"the diff does not apply: {applied['error']}")
        run = run_tests(sandbox, checkout, task.test_files, runner=task.runner)
    finally:
        sandbox.close()

    restored = tuple(applied["restored"])
    if run.why:
        return Outcome(0, 0, applied=True, why=run.why, restored=restored)
    return Outcome(run.passed(task.fail_to_pass), run.passed(task.pass_to_pass), applied=True, restored=restored)


def apply_diff(
    sandbox: Sandbox, checkout: Checkout, diff: str, test_patch: str = "", machinery: Sequence[str] = ()
) -> dict[str, Any]:
    """What the harness says of the diff: applied, restored, error. `machinery`: put back too, beside tests."""
    job = {
        "base": checkout.base,
        "diff": diff,
        "test_patch": test_patch,
        "import_roots": ["" if folder == "." else folder for folder in checkout.python_path],
        "machinery": list(machinery),
    }

    result = _harness(sandbox, checkout, "apply_diff.py", job)
    try:
        answer = json.loads(result.output)
    except ValueError:
        answer = {"applied": False, "restored": [], "error": result.text()[-500:]}
    return dict(answer)


def run_tests(
    sandbox: Sandbox, checkout: Checkout, files: Sequence[str], seed: int = 0, runner: RunnerName = "pytest"
) -> TestRun:
    """All tests of these files (pytest: or folders), once; `seed` is that of Python's hashes."""
    key = secrets.token_hex(16)
    test_runner = RUNNERS[runner]
    job = {"key": key, "files": list(files), "python_path": list(checkout.python_path)}
    environment = test_runner.environment | {"PYTHONHASHSEED": str(seed)}
    result = _harness(sandbox, checkout, test_runner.script, job, environment)
    output, found, line = result.text().rstrip().rpartition("\n")

    if result.timed_out:
        return TestRun(why="the tests ran out of time", output=output)
    if result.out_of_memory:
        return TestRun(why="the tests ran out of memory", output=output)

    try:
        report = json.loads(line) if found else {}
    except (ValueError, RecursionError):
        report = {}
    if not isinstance(report, dict) or report.get("key") != key:
        return TestRun(why="the test run did not come to its end", output=output)
    if report["canaries"] != ["failed"] * test_runner.canaries:
        return TestRun(why="tests that must fail passed: the test machinery was tampered with", output=output)
    return TestRun(dict(report["outcomes"]), output, seconds=result.seconds)


def _harness(
    sandbox: Sandbox, checkout: Checkout, script: str, job: object, environment: dict[str, str] | None = None
) -> Result:
    argv = [checkout.python, "-s", f"{HARNESS}/{script}"]
    return sandbox.run(Command(argv, json.dumps(job).encode(), environment=environment or {}))

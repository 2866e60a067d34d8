"""The reward: a submitted diff, applied in a fresh sandbox, against FAIL_TO_PASS and PASS_TO_PASS.

Nothing of the sandbox in which the agent worked is used but the text of its diff. Tests, their configuration and what
could shadow their tools are put back before anything runs (`harness/apply_diff.py`); the files of the tests cannot
change while they run. A test counts as passed only if the harness says so, with its random key, at the end of a whole
run whose canaries failed. What would be rewarded is tried a second time, with tests of the same names that must fail
(`must_fail.py`). Limit: tests and code under test share a process; docs/swe.md says what stays open.
"""

from __future__ import annotations

import contextlib
import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec

from envs.sandbox import Backend, Command, Limits, Result, Sandbox, SandboxError, read_file, write_file
from envs.sandbox.runtime import HARNESS
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.must_fail import must_fail_copy
from envs.swe.runners import (
    RUNNERS,
    RunnerName,
    changed_paths,
    files_of,
    has_file,
    must_fail_name,
    protected_paths,
    share_passed,
)
from envs.swe.tasks import SweTask

MAX_DIFF_CHARS = 1_000_000
TEST_LIMITS = Limits(timeout_s=300, memory_bytes=2 << 30, processes=128, disk_bytes=512 << 20, output_bytes=8 << 20)


@dataclass(frozen=True)
class DiffResult:
    """What a submitted diff earns. Where `why` says something, nothing counts."""

    fail_to_pass: float
    """Share of these tests that pass now."""
    pass_to_pass: float
    """Share of these tests that still pass."""
    applied: bool
    why: str = ""
    """The diff does not apply, a run did not end, or tests or their machinery were tampered with."""
    tampered: bool = False
    """Tests that must fail passed, or files of tests changed while they ran."""
    restored: tuple[str, ...] = ()
    """Paths that were put back before the tests ran."""

    @property
    def resolved(self) -> bool:
        return self.applied and self.fail_to_pass == 1 and self.pass_to_pass == 1

    def reward(self, *, partial: bool) -> float:
        """The reward: 1 if resolved, else 0; with `partial`, the share of FAIL_TO_PASS, if every PASS_TO_PASS still
        passes."""
        if partial and self.pass_to_pass == 1:
            return self.fail_to_pass
        return float(self.resolved)


@dataclass(frozen=True)
class TestRun:
    """`outcomes` by test id: passed, failed, skipped, xfailed. Empty where `why` says that the run does not count."""

    # Tells pytest that this class holds no tests.
    __test__ = False
    outcomes: Mapping[str, str] = field(default_factory=dict)
    output: str = ""
    why: str = ""
    seconds: float = 0.0
    tampered: bool = False

    def passed(self, tests: Sequence[str]) -> float:
        """Share of `tests` that passed; 1 of none."""
        return share_passed(self.outcomes, tests)


def evaluate(
    backend: Backend, checkout: Checkout, task: SweTask, diff: str, limits: Limits = TEST_LIMITS
) -> DiffResult:
    """Blocks for the time of the tests. Raises SandboxError for faults of the host only."""
    if len(diff) > MAX_DIFF_CHARS:
        return DiffResult(0, 0, applied=False, why=f"the diff has {len(diff)} characters, more than {MAX_DIFF_CHARS}")

    applied, run = _counted_run(backend, checkout, task, diff, limits)
    if not applied["applied"]:
        return DiffResult(0, 0, applied=False, why=f"the diff does not apply: {applied['error']}")

    restored = tuple(applied["restored"])
    fail_to_pass = run.passed(task.fail_to_pass)
    if not run.why and fail_to_pass:
        broken = _must_fail_run(backend, checkout, task, diff, limits, run)
        run = replace(run, why=broken.why, tampered=broken.tampered)

    if run.why:
        return DiffResult(0, 0, applied=True, why=run.why, tampered=run.tampered, restored=restored)
    return DiffResult(fail_to_pass, run.passed(task.pass_to_pass), applied=True, restored=restored)


def _counted_run(
    backend: Backend, checkout: Checkout, task: SweTask, diff: str, limits: Limits
) -> tuple[dict[str, Any], TestRun]:
    """What `apply_diff` says, and the run of the task's tests."""
    with _patched(backend, checkout, task, diff, limits) as (sandbox, checkout, applied):
        if not applied["applied"]:
            return applied, TestRun(why="the diff does not apply")
        return applied, _run_unchanged(sandbox, checkout, task, applied["kept"])


def _must_fail_run(
    backend: Backend, checkout: Checkout, task: SweTask, diff: str, limits: Limits, counted: TestRun
) -> TestRun:
    """A run of copies of the tests that must fail, in the time that `counted` has left; `why`: what came otherwise."""
    with _patched(backend, checkout, task, diff, limits) as (sandbox, checkout, applied):
        if not applied["applied"]:
            return TestRun(why="the diff does not apply")
        must_fail = break_tests(sandbox, task)
        if not must_fail:
            return TestRun()

        left_s = max(limits.timeout_s - counted.seconds, 0.001)
        run = _run_unchanged(sandbox, checkout, task, applied["kept"], left_s)
        if run.passed(must_fail) or any("passed" in each for each in _by_test(run, must_fail).values()):
            return replace(run, why="tests passed that must fail", tampered=True)
        if task.runner == "pytest" and not run.why and _vanished(run, counted, must_fail):
            return replace(run, why="tests that must fail were not run", tampered=True)
        return run


@contextlib.contextmanager
def _patched(
    backend: Backend, checkout: Checkout, task: SweTask, diff: str, limits: Limits
) -> Iterator[tuple[Sandbox, Checkout, dict[str, Any]]]:
    """A fresh sandbox with its checkout, to which the diff and the task's tests were applied; what the harness says."""
    checkout, sandbox = open_checkout(backend, checkout, limits)
    try:
        machinery = protected_paths(task.runner, task.gold_patch, task.test_files, task.test_patch)
        fixed = changed_paths(task.gold_patch)
        yield sandbox, checkout, apply_diff(sandbox, checkout, diff, task.test_patch, machinery, fixed)
    finally:
        sandbox.close()


def _run_unchanged(
    sandbox: Sandbox, checkout: Checkout, task: SweTask, kept: Sequence[str], timeout_s: float | None = None
) -> TestRun:
    """The tests that stand there; none of the files that are kept may change while they run."""
    before = _digests(sandbox, kept)
    read_only = beside(task.test_files, kept)
    run = run_tests(sandbox, checkout, task.test_files, runner=task.runner, read_only=read_only, timeout_s=timeout_s)
    if run.passed(task.fail_to_pass) and _digests(sandbox, kept) != before:
        return replace(run, why="files of the tests changed while they ran", tampered=True)
    return run


def _vanished(run: TestRun, counted: TestRun, tests: Sequence[str]) -> bool:
    """Whether a test that passed where it is counted is not even there now, or less often. This is so when code changes
    tests while they are collected: which of the two runs it meets in time is luck.
    """
    now, before = (_by_test(each, tests) for each in (run, counted))
    return any("passed" in before[name] and len(now[name]) < len(before[name]) for name in before)


def _by_test(run: TestRun, tests: Sequence[str]) -> dict[str, list[str]]:
    """The outcomes of each of these tests with any parameters: those of the copies have other names."""
    names = {_without_parameters(test): list[str]() for test in tests if has_file(test)}
    for test, outcome in run.outcomes.items():
        if has_file(test) and _without_parameters(test) in names:
            names[_without_parameters(test)].append(outcome)
    return names


def _without_parameters(test: str) -> str:
    return f"{test.partition('::')[0]}::{must_fail_name(test)}"


def break_tests(sandbox: Sandbox, task: SweTask) -> tuple[str, ...]:
    """Put copies that must fail in the place of the files of FAIL_TO_PASS; which of the task's tests those are."""
    listed = (*task.fail_to_pass, *task.pass_to_pass)
    known = [{must_fail_name(test) for test in tests} for tests in (task.fail_to_pass, task.pass_to_pass)]
    names: set[tuple[str, str]] = set()

    for path in files_of(task.fail_to_pass) or task.test_files:
        source = read_file(sandbox, path)
        with contextlib.suppress(UnicodeDecodeError):
            copy = must_fail_copy((source or b"").decode(), *known)
            if copy.names and not write_file(sandbox, path, copy.text.encode()):
                raise SandboxError(f"{task.instance_id}: {path} cannot be written in a fresh sandbox")
            names |= {(path if task.runner == "pytest" else "", name) for name in copy.names}

    return tuple(test for test in listed if (next(iter(files_of([test])), ""), must_fail_name(test)) in names)


def beside(test_files: Sequence[str], kept: Sequence[str]) -> list[str]:
    """The files of tests, and what else is kept in their folders and in those above."""
    folders = {str(folder) for path in test_files for folder in PurePosixPath(path).parents}
    return sorted({*test_files, *(path for path in kept if str(PurePosixPath(path).parent) in folders)})


def apply_diff(
    sandbox: Sandbox,
    checkout: Checkout,
    diff: str,
    test_patch: str = "",
    machinery: Sequence[str] = (),
    fixed: Sequence[str] = (),
) -> dict[str, Any]:
    """What the harness says of the diff: applied, restored, kept, error. `machinery`: put back too, beside tests."""
    job = {
        "base": checkout.base,
        "diff": diff,
        "test_patch": test_patch,
        "import_roots": ["" if folder == "." else folder for folder in checkout.python_path],
        "machinery": list(machinery),
        "fixed": list(fixed),
    }

    result = _harness(sandbox, checkout, "apply_diff.py", job)
    try:
        answer = json.loads(result.output)
    except (ValueError, RecursionError):
        answer = {"applied": False, "restored": [], "kept": [], "error": result.text()[-500:]}
    return dict(answer)


def run_tests(
    sandbox: Sandbox,
    checkout: Checkout,
    files: Sequence[str],
    seed: int = 0,
    runner: RunnerName = "pytest",
    read_only: Sequence[str] = (),
    timeout_s: float | None = None,
) -> TestRun:
    """All tests of these files (pytest: or folders), once; `seed` is that of Python's hashes."""
    key = secrets.token_hex(16)
    test_runner = RUNNERS[runner]
    job = {"key": key, "files": list(files), "python_path": list(checkout.python_path)}
    environment = test_runner.environment | {"PYTHONHASHSEED": str(seed)}
    result = _harness(sandbox, checkout, test_runner.script, job, environment, read_only, timeout_s)
    output, _, line = result.text().rstrip().rpartition("\n")

    if result.timed_out:
        return TestRun(why="the tests ran out of time", output=output)
    if result.out_of_memory:
        return TestRun(why="the tests ran out of memory", output=output)

    try:
        report = msgspec.convert(json.loads(line), _Report)
    except (ValueError, RecursionError):
        report = _Report("", [], {})
    if report.key != key:
        return TestRun(why="the test run did not come to its end", output=output)
    if report.canaries != ["failed"] * test_runner.canaries:
        why = "tests that must fail passed: the test machinery was tampered with"
        return TestRun(why=why, output=output, tampered=True)
    return TestRun(report.outcomes, output, seconds=result.seconds)


class _Report(msgspec.Struct):
    """The line of the harness, as hostile as whatever runs beside it."""

    key: str
    canaries: list[str]
    outcomes: dict[str, Literal["passed", "failed", "skipped", "xfailed"]]


def _digests(sandbox: Sandbox, files: Sequence[str]) -> bytes:
    given = "\0".join(files).encode(errors="surrogateescape")
    return sandbox.run(Command(["xargs", "--null", "--no-run-if-empty", "sha256sum", "--"], given)).output


def _harness(
    sandbox: Sandbox,
    checkout: Checkout,
    script: str,
    job: object,
    environment: dict[str, str] | None = None,
    read_only: Sequence[str] = (),
    timeout_s: float | None = None,
) -> Result:
    argv = [checkout.python, "-s", f"{HARNESS}/{script}"]
    given = json.dumps(job).encode()
    return sandbox.run(Command(argv, given, timeout_s, environment or {}, read_only=read_only))

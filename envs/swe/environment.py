"""Software engineering: an issue and a repository, a shell and an editor over many turns, rewarded by the tests."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, Field

from envs.audit.auditor import Change
from envs.rows import RowError
from envs.sandbox import BackendName, Limits, Sandbox, SandboxError
from envs.sandbox.service import SandboxService
from envs.sources import SourceOptions, split_tasks
from envs.swe.audit import changes
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.checkout_cache import CheckoutCache
from envs.swe.evaluate import MAX_DIFF_CHARS, TEST_LIMITS, DiffResult, evaluate
from envs.swe.generate import generated_tasks
from envs.swe.gold import gold_turns
from envs.swe.packages import PACKAGES
from envs.swe.runners import put_back_of_fix
from envs.swe.tasks import SweTask, load_tasks
from envs.swe.tool_calls import MAX_CALLS, BadCall, ToolCall, parse_calls, tools_text
from envs.swe.tools import Toolbox, extract_diff
from rollout.episodes.environment import ChatMessage, Needs, RewardFailed, Step

SYSTEM_PROMPT = (
    "You are a software engineer. Fix the issue in the repository in your working directory, then call submit. "
    "The work is judged by the repository's tests; changes to tests and to their configuration are not counted.\n\n"
)


CUT_OFF = BadCall("the turn was cut off at its longest length, and none of its calls was made; write less at once")


class SweOptions(SourceOptions):
    """`env.options` of `env.name=swe`."""

    eval_count: int = Field(8, ge=0)
    """Tasks held out of the source."""
    generated_count: int = Field(48, ge=1)
    """Tasks to generate, once; they are kept in the cache folder."""
    packages: list[str] = Field(default_factory=lambda: ["toolz", "cachetools", "inflection", "tabulate"])
    """Where generated tasks come from; see envs/swe/packages.py."""
    repositories: Path | None = None
    """Checkouts `INSTANCE_ID/` or `OWNER__REPO@COMMIT/` for published tasks without images."""
    sandbox: BackendName = "auto"
    """`bubblewrap`, `docker` (images per task, as SWE-bench publishes them), or what this machine has."""
    sandboxes: int = Field(64, ge=1)
    """How many sandboxes are alive at once in one server: one for each episode."""
    threads: int = Field(4, ge=1)
    """Commands and evaluations running at once in one server."""
    partial_reward: bool = False
    """Reward the share of FAIL_TO_PASS that passes, as long as every PASS_TO_PASS does; else all or nothing."""
    output_bytes: int = Field(8192, ge=64)
    """Longest answer of a tool; the middle is left out."""
    command_s: float = Field(30.0, gt=0)
    """Longest command of the agent; a turn has at most eight."""
    test_s: float = Field(300.0, gt=0)
    """Longest run of the tests, that of the copies which must fail included."""
    memory_mb: int = Field(2048, ge=64)
    """The memory of all processes of one sandbox."""
    statement_chars: int = Field(20_000, ge=100)
    """Longest problem statement; the middle is left out."""


class SweFamily:
    """The tasks and the sandboxes of one environment server."""

    Options: type[BaseModel] = SweOptions
    audit_s = 30.0

    def __init__(self, options: SweOptions, seed: int) -> None:
        """Raises RowError or ValueError for a source that cannot be used."""
        unknown = [name for name in options.packages if name not in PACKAGES]
        if unknown:
            raise ValueError(f"packages={options.packages}: {unknown[0]!r} is none of {', '.join(PACKAGES)}")

        self.options = options
        self.seed = seed
        self._tasks: dict[str, list[SweTask]] | None = None
        if options.source != "generated":
            self._tasks = self._split(_load(options.source, options.subset, options.split))
        elif options.eval_count >= options.generated_count:
            raise ValueError(
                f"eval_count={options.eval_count}: leaves nothing of generated_count={options.generated_count}"
            )

        memory = options.memory_mb << 20
        self._limits = Limits(timeout_s=options.command_s, memory_bytes=memory, output_bytes=2 * MAX_DIFF_CHARS)
        self._test_limits = replace(TEST_LIMITS, timeout_s=options.test_s, memory_bytes=memory)
        self._checkouts = CheckoutCache(repositories=options.repositories)
        # An evaluation takes a sandbox of its own, beside those of the episodes.
        slots = options.sandboxes + options.threads
        self.sandboxes = SandboxService(options.sandbox, slots, options.threads)
        self.episode_slots = asyncio.Semaphore(options.sandboxes)

    @classmethod
    def needs(cls, options: SweOptions) -> Needs:
        """A turn to work and one to submit; commands, and then the tests, within one step."""
        why = f"{MAX_CALLS} commands of env.options.command_s={options.command_s:g}, tests of test_s={options.test_s:g}"
        step_s = MAX_CALLS * options.command_s + options.test_s
        return Needs(step_s, why, 2, options.sandboxes, f"env.options.sandboxes={options.sandboxes}")

    def task_count(self, split: str) -> int:
        if self._tasks is not None:
            return len(self._tasks[split])
        held_out = self.options.eval_count
        return held_out if split == "eval" else self.options.generated_count - held_out

    @property
    def knows_tasks(self) -> bool:
        """Generated tasks are there once `start` is done."""
        return self._tasks is not None

    def data(self) -> Sequence[object]:
        """Of generated tasks what makes them."""
        if self._tasks is not None:
            return self._tasks["train"]
        return [*self.options.packages, self.seed, self.options.generated_count, self.options.eval_count]

    def task(self, split: str, index: int) -> SweTask:
        assert self._tasks is not None, "start() comes first"
        return self._tasks[split][index]

    async def start(self) -> None:
        """Raises SandboxError or PackageError, one line, where sandboxes or packages are missing."""
        await self.sandboxes.start()
        if self._tasks is None:
            options = self.options
            wanted = (options.packages, options.generated_count, self.seed)
            tasks = await asyncio.to_thread(generated_tasks, self.sandboxes.backend, *wanted, self._checkouts)
            self._tasks = self._split(tasks)

    def make(self) -> SweEnvironment:
        return SweEnvironment(self)

    async def stop(self) -> None:
        await self.sandboxes.stop()

    def open_sandbox(self, task: SweTask) -> tuple[Checkout, Sandbox]:
        """Open a sandbox on the task's repository, which blocks. Raises PackageError or SandboxError where the
        repository cannot be had."""
        backend = self.sandboxes.backend
        checkout = self._checkouts.prepare(task, images=backend.name != "bubblewrap")
        return open_checkout(backend, checkout, self._limits)

    def evaluate(self, task: SweTask, checkout: Checkout, diff: str) -> DiffResult:
        """Blocks for the time of the tests."""
        return evaluate(self.sandboxes.backend, checkout, task, diff, self._test_limits)

    async def changes(self, task: SweTask, response: str, dice: random.Random) -> list[Change]:
        """Of the task's own fix: whether other diffs are right is not known without the tests."""

        def made() -> list[Change]:
            _, sandbox = self.open_sandbox(task)
            try:
                return changes(task, sandbox, dice)
            finally:
                sandbox.close()

        return await self.sandboxes.run(made)

    async def judged(self, change: Change) -> bool:
        def resolved() -> bool:
            checkout = self._checkouts.prepare(change.task, images=self.sandboxes.backend.name != "bubblewrap")
            return self.evaluate(change.task, checkout, change.response).resolved

        return await self.sandboxes.run(resolved)

    def _split(self, tasks: list[SweTask]) -> dict[str, list[SweTask]]:
        return split_tasks(self.options, tasks, _load)


class SweEnvironment:
    """reset → (bash | view | edit)* → submit. Work that is cut before is evaluated as it stands."""

    def __init__(self, family: SweFamily) -> None:
        self._family = family
        self._sandbox: Sandbox | None = None
        self._has_slot = False
        self._closed = False
        self._turns = 0
        self._counts = {"tool_calls": 0.0, "malformed_calls": 0.0, "failed_calls": 0.0, "invalid_share": 0.0}

    async def reset(self, task: SweTask) -> list[ChatMessage]:
        options = self._family.options
        self._task = task
        await self._family.episode_slots.acquire()
        self._has_slot = True
        self._checkout, sandbox = await self._family.sandboxes.run(lambda: self._open_sandbox(task))
        self._tools = Toolbox(sandbox, self._checkout, options.output_bytes, options.command_s)

        statement = task.problem_statement
        if len(statement) > options.statement_chars:
            half = options.statement_chars // 2
            left_out = len(statement) - 2 * half
            statement = f"{statement[:half]}\n[... {left_out} characters left out ...]\n{statement[-half:]}"
        return [ChatMessage("system", SYSTEM_PROMPT + tools_text()), ChatMessage("user", statement)]

    async def gold(self) -> str | None:
        turns = gold_turns(self._task)
        return turns[self._turns] if turns is not None and self._turns < len(turns) else None

    async def step(self, action: str, truncated: bool = False) -> Step:
        self._turns += 1
        answers: list[ChatMessage] = []
        for call in [CUT_OFF] if truncated else parse_calls(action):
            if isinstance(call, ToolCall) and call.name == "submit":
                return await self._evaluated(submitted=True)
            answers.append(ChatMessage("tool", await self._answer(call)))
        return Step(answers, 0.0, done=False, success=False, info=self._counts)

    async def finish(self) -> Step:
        return await self._evaluated(submitted=False)

    async def close(self) -> None:
        self._closed = True
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._family.sandboxes.run(sandbox.close)
        if self._has_slot:
            self._has_slot = False
            self._family.episode_slots.release()

    def _open_sandbox(self, task: SweTask) -> tuple[Checkout, Sandbox]:
        """To be called in a thread, which goes on when the episode is cancelled meanwhile: then nobody else closes the
        sandbox."""
        checkout, sandbox = self._family.open_sandbox(task)
        self._sandbox = sandbox
        if self._closed:
            sandbox.close()
        return checkout, sandbox

    async def _answer(self, call: ToolCall | BadCall) -> str:
        self._counts["tool_calls"] += 1
        self._counts["malformed_calls"] += isinstance(call, BadCall)
        self._counts["invalid_share"] = self._counts["malformed_calls"] / self._counts["tool_calls"]
        if isinstance(call, BadCall):
            return f"Error: {call.why}"
        result = await self._family.sandboxes.run(lambda: self._tools.call(call))
        self._counts["failed_calls"] += not result.ok
        return result.text

    async def _evaluated(self, *, submitted: bool) -> Step:
        try:
            outcome, diff = await self._family.sandboxes.run(self._evaluate)
        except SandboxError as error:
            raise RewardFailed(f"swe: the tests could not be run: {error}") from error
        reward = outcome.reward(partial=self._family.options.partial_reward)

        info = self._counts | {
            "resolved": float(outcome.resolved),
            "submitted": float(submitted),
            "fail_to_pass": outcome.fail_to_pass,
            "pass_to_pass": outcome.pass_to_pass,
            "tampered": float(outcome.tampered),
            "diff_applied": float(outcome.applied),
            "diff_chars": float(len(diff)),
            "turns": float(self._turns),
            "restored_files": float(len(outcome.restored)),
        }
        return Step([], reward, done=True, success=outcome.resolved, info=info)

    def _evaluate(self) -> tuple[DiffResult, str]:
        """The agent's sandbox ends before the tests begin: a server needs no more of them than episodes."""
        assert self._sandbox is not None, "reset() comes first"
        diff = extract_diff(self._sandbox, self._checkout.base, MAX_DIFF_CHARS)
        self._sandbox.close()
        return self._family.evaluate(self._task, self._checkout, diff), diff


def _load(source: str, subset: str | None, split: str) -> list[SweTask]:
    """Raises RowError, also for rows whose tests cannot be found: nothing would ever be rewarded."""
    tasks = load_tasks(source, subset, split)
    unfit = [task for task in tasks if task.schema == "r2e-gym"]
    if unfit:
        raise RowError(
            f"{source}: {len(unfit)} of {len(tasks)} rows are of R2E-Gym, whose 'expected_output_json' names tests "
            f"without their files (as {unfit[0].fail_to_pass[0]!r}): they cannot be rewarded; leave these rows out, or "
            "train on a data set whose 'FAIL_TO_PASS' has ids like 'tests/test_a.py::test_one'"
        )
    return _playable(source, tasks)


def _playable(source: str, tasks: list[SweTask]) -> list[SweTask]:
    """The tasks without those whose fix would be put back before the tests run: nobody could ever solve them."""
    left_out = {task.instance_id: path for task in tasks if (path := put_back_of_fix(task.gold_patch))}
    if left_out:
        name, path = next(iter(left_out.items()))
        why = f"{len(left_out)} of {len(tasks)} tasks are left out: their fix changes what their tests are run with"
        print(f"{source}: {why} ({name}: {path})", file=sys.stderr, flush=True)

    kept = [task for task in tasks if task.instance_id not in left_out]
    if not kept:
        raise RowError(f"{source}: {why}; name another source")
    return kept

"""Software engineering: an issue and a repository, a shell and an editor over many turns, rewarded by the tests."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, Field

from envs.rows import RowError
from envs.sandbox import Backend, BackendName, Limits, Sandbox, make_backend
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.checkout_cache import CheckoutCache
from envs.swe.evaluate import MAX_DIFF_CHARS, TEST_LIMITS, Outcome, evaluate
from envs.swe.packages import PACKAGES
from envs.swe.store import generated_tasks
from envs.swe.tasks import SweTask, load_tasks
from envs.swe.tool_calls import Malformed, ToolCall, parse_calls, tools_text
from envs.swe.tools import Toolbox, extract_diff
from rollout.episodes.environment import ChatMessage, Step

T = TypeVar("T")
SYSTEM_PROMPT = (
    "You are a software engineer. Fix the issue in the repository in your working directory, then call submit. "
    "The work is judged by the repository's tests; changes to tests and to their configuration are not counted.\n\n"
)


class SweOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    source: str = "generated"
    """`generated` (bugs in pinned packages), a `.jsonl` or `.parquet` file, or a hub name; see envs/swe/tasks.py."""
    subset: str | None = None
    """Subset of a hub data set."""
    split: str = "train"
    """Split of a hub data set to train on."""
    eval_source: str | None = None
    """Held-out tasks: another file or hub name; None: the last `eval_count` tasks of the source."""
    eval_split: str = "test"
    """Split of `eval_source` where that is a hub name."""
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
    """Alive at once in one server: one for each episode, further episodes wait."""
    threads: int = Field(4, ge=1)
    """Commands and judgements running at once in one server."""
    partial_reward: bool = False
    """Reward the share of FAIL_TO_PASS that passes, as long as every PASS_TO_PASS does; else all or nothing."""
    turn_limit: int = Field(30, ge=1)
    """Turns after which the work is judged as it stands; env.max_turns should be as large."""
    output_bytes: int = Field(8192, ge=64)
    """Longest answer of a tool; the middle is left out."""
    command_s: float = Field(30.0, gt=0)
    """Longest command of the agent."""
    test_s: float = Field(300.0, gt=0)
    """Longest run of the tests; env.step_deadline_s should be larger."""
    memory_mb: int = Field(2048, ge=64)
    """Of all processes of one sandbox."""
    statement_chars: int = Field(20_000, ge=100)
    """Longest problem statement; the middle is left out."""


class SweFamily:
    Options = SweOptions

    def __init__(self, options: SweOptions, seed: int) -> None:
        unknown = [name for name in options.packages if name not in PACKAGES]
        if unknown:
            raise ValueError(f"packages={options.packages}: {unknown[0]!r} is none of {', '.join(PACKAGES)}")
        self.options, self.seed = options, seed
        self._tasks: dict[str, list[SweTask]] | None = None
        if options.source != "generated":
            self._tasks = _split(options, _load(options, options.source, options.split))
        elif options.eval_count >= options.generated_count:
            raise ValueError(
                f"eval_count={options.eval_count}: leaves nothing of generated_count={options.generated_count}"
            )
        memory = options.memory_mb << 20
        self.limits = Limits(timeout_s=options.command_s, memory_bytes=memory, output_bytes=2 * MAX_DIFF_CHARS)
        self.test_limits = replace(TEST_LIMITS, timeout_s=options.test_s, memory_bytes=memory)
        self.checkouts = CheckoutCache(repositories=options.repositories)
        self._backend: Backend | None = None
        self._threads = ThreadPoolExecutor(options.threads, "swe")
        self.places = asyncio.Semaphore(options.sandboxes)

    def task_count(self, split: str) -> int:
        if self._tasks is not None:
            return len(self._tasks[split])
        held_out = self.options.eval_count
        return held_out if split == "eval" else self.options.generated_count - held_out

    def task(self, split: str, index: int) -> SweTask:
        """Generated tasks are there once `start` is done."""
        assert self._tasks is not None, "start() comes first"
        return self._tasks[split][index]

    async def start(self) -> None:
        """Raises SandboxError or PackageError, one line, where sandboxes or packages are missing."""
        options = self.options
        slots = options.sandboxes + options.threads  # a judgement takes one of its own
        self._backend = await asyncio.to_thread(make_backend, options.sandbox, slots, options.threads)
        if self._tasks is None:
            work = functools.partial(
                generated_tasks, self._backend, options.packages, options.generated_count, self.seed, self.checkouts
            )
            self._tasks = _split(options, await asyncio.to_thread(work))

    def make(self) -> SweEnvironment:
        return SweEnvironment(self)

    async def stop(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        if self._backend is not None:
            await asyncio.to_thread(self._backend.close)

    async def blocking(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def begin(self, task: SweTask) -> tuple[Checkout, Sandbox]:
        backend = self._backend
        assert backend is not None, "start() comes first"
        checkout = self.checkouts.prepare(task, images=backend.name != "bubblewrap")
        return open_checkout(backend, checkout, self.limits)

    def judge(self, task: SweTask, checkout: Checkout, diff: str) -> Outcome:
        assert self._backend is not None
        return evaluate(self._backend, checkout, task, diff, self.test_limits)


class SweEnvironment:
    """reset → (bash | view | edit)* → submit, or the turn limit: then the work is judged as it stands."""

    def __init__(self, family: SweFamily) -> None:
        self._family = family
        self._sandbox: Sandbox | None = None
        self._placed = self._closed = False
        self._turns = 0
        self._counts = {"tool_calls": 0.0, "malformed_calls": 0.0, "failed_calls": 0.0}

    async def reset(self, task: SweTask) -> list[ChatMessage]:
        options = self._family.options
        self._task = task
        await self._family.places.acquire()
        self._placed = True
        self._workplace, sandbox = await self._family.blocking(lambda: self._begin(task))
        self._tools = Toolbox(sandbox, self._workplace, options.output_bytes, options.command_s)
        statement = task.problem_statement
        if len(statement) > options.statement_chars:
            half = options.statement_chars // 2
            left_out = len(statement) - 2 * half
            statement = f"{statement[:half]}\n[... {left_out} characters left out ...]\n{statement[-half:]}"
        return [ChatMessage("system", SYSTEM_PROMPT + tools_text()), ChatMessage("user", statement)]

    async def step(self, action: str) -> Step:
        self._turns += 1
        answers: list[ChatMessage] = []
        for call in parse_calls(action):
            if isinstance(call, ToolCall) and call.name == "submit":
                return await self._judged(submitted=True)
            answers.append(ChatMessage("tool", await self._answer(call)))
        if self._turns >= self._family.options.turn_limit:
            return await self._judged(submitted=False)
        return Step(answers, 0.0, done=False, info=self._counts)

    async def close(self) -> None:
        self._closed = True
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            await self._family.blocking(sandbox.close)
        if self._placed:
            self._placed = False
            self._family.places.release()

    def _begin(self, task: SweTask) -> tuple[Checkout, Sandbox]:
        """In a thread, which goes on when the episode is cancelled meanwhile: then nobody else closes the sandbox."""
        checkout, sandbox = self._family.begin(task)
        self._sandbox = sandbox
        if self._closed:
            sandbox.close()
        return checkout, sandbox

    async def _answer(self, call: ToolCall | Malformed) -> str:
        self._counts["tool_calls"] += 1
        if isinstance(call, Malformed):
            self._counts["malformed_calls"] += 1
            return f"Error: {call.why}"
        answer = await self._family.blocking(lambda: self._tools.call(call))
        self._counts["failed_calls"] += not answer.good
        return answer.text

    async def _judged(self, *, submitted: bool) -> Step:
        outcome, diff = await self._family.blocking(self._judge)
        info = {
            **self._counts, "resolved": float(outcome.resolved), "submitted": float(submitted),
            "fail_to_pass": outcome.fail_to_pass, "pass_to_pass": outcome.pass_to_pass,
            "diff_applied": float(outcome.applied), "diff_chars": float(len(diff)), "turns": float(self._turns),
            "restored_files": float(len(outcome.restored)),
        }  # fmt: skip
        return Step([], outcome.reward(partial=self._family.options.partial_reward), done=True, info=info)

    def _judge(self) -> tuple[Outcome, str]:
        """The agent's sandbox ends before the tests begin: a server needs no more of them than episodes."""
        assert self._sandbox is not None, "reset() comes first"
        diff = extract_diff(self._sandbox, self._workplace.base, MAX_DIFF_CHARS)
        self._sandbox.close()
        return self._family.judge(self._task, self._workplace, diff), diff


def _load(options: SweOptions, source: str, split: str) -> list[SweTask]:
    """Raises RowError, also for rows whose tests cannot be found: nothing would ever be rewarded."""
    tasks = load_tasks(source, options.subset, split)
    unfit = [task for task in tasks if task.schema == "r2e-gym"]
    if unfit:
        raise RowError(
            f"{source}: {len(unfit)} of {len(tasks)} rows are of R2E-Gym, whose 'expected_output_json' names tests "
            f"without their files (as {unfit[0].fail_to_pass[0]!r}): they cannot be rewarded; leave these rows out, or "
            "train on a data set whose 'FAIL_TO_PASS' has ids like 'tests/test_a.py::test_one'"
        )
    return tasks


def _split(options: SweOptions, tasks: list[SweTask]) -> dict[str, list[SweTask]]:
    if options.eval_source is not None:
        return {"train": tasks, "eval": _load(options, options.eval_source, options.eval_split)}
    if options.eval_count >= len(tasks):
        raise ValueError(f"eval_count={options.eval_count}: there are only {len(tasks)} tasks")
    cut = len(tasks) - options.eval_count
    return {"train": tasks[:cut], "eval": tasks[cut:]}

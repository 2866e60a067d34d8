"""Single-turn programming problems: one question, one response; rewarded by the problem's tests."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from envs.audit.auditor import Change, replayed
from envs.code.audit import changes
from envs.code.generate import generated_problem
from envs.code.problems import CodeProblem, load_problems
from envs.code.verifier import CodeVerifier, Verdict
from envs.sandbox import BackendName, Limits, SandboxError, Template
from envs.sandbox.runtime import default_runtime
from envs.sandbox.service import SandboxService
from envs.sources import SourceOptions, split_tasks
from rollout.episodes.environment import ChatMessage, Needs, RewardFailed, Step


class CodeOptions(SourceOptions):
    """`env.options` of `env.name=code`."""

    tasks: int | None = Field(None, ge=1)
    """Training problems used, from the first; None: all (10 000 of `generated`)."""
    eval_count: int = Field(64, ge=0)
    """Held-out problems that are generated, or taken from the end of the source."""
    reward: Literal["all", "fraction"] = "all"
    """`all`: 1 if every test passes, else 0. `fraction`: the share of tests that pass."""
    system_prompt: str = ""
    """The system prompt; none if it is empty."""
    instruction: str = "\nAnswer with one Python code block."
    """A text that is appended to each question."""
    sandbox: BackendName = "auto"
    """`bubblewrap` or `auto`; code runs on the host's Python, so `docker` cannot serve."""
    threads: int = Field(4, ge=1)
    """Solutions verified at once by one server."""
    cpu_s: int = Field(4, ge=1)
    """CPU seconds of a solution, or of a program for one input: what decides, however busy the machine is."""
    timeout_s: float = Field(25.0, gt=0)
    """The time for all tests of one solution, by the clock: for what waits."""
    case_s: float = Field(15.0, gt=0)
    """The time for one input of a program, by the clock."""
    memory_mb: int = Field(512, ge=32)
    """The memory of a solution and whatever it starts."""


class CodeFamily:
    """The problems and the sandboxes of one environment server."""

    Options: type[BaseModel] = CodeOptions
    audit_s = 0.5

    def __init__(self, options: CodeOptions, seed: int) -> None:
        """Raises RowError or ValueError for a source that cannot be used."""
        if options.sandbox == "docker":
            raise ValueError("sandbox='docker': code problems run on the host's Python; use 'auto' or 'bubblewrap'")

        self.options = options
        self._count: dict[str, int]
        self._problem: dict[str, Callable[[int], CodeProblem]]
        if options.source == "generated":
            self._count = {"train": options.tasks or 10_000, "eval": options.eval_count}
            self._problem = {
                split: functools.partial(generated_problem, split, seed=seed) for split in ("train", "eval")
            }

        else:
            loaded = load_problems(options.source, options.subset, options.split)
            problems = split_tasks(options, loaded, load_problems)
            problems["train"] = problems["train"][: options.tasks]
            self._count = {split: len(listed) for split, listed in problems.items()}
            self._problem = {split: listed.__getitem__ for split, listed in problems.items()}

        self._sandboxes = SandboxService(options.sandbox, slots=options.threads, threads=options.threads)
        self._empty = tempfile.TemporaryDirectory(prefix="fresco-code-")
        Path(self._empty.name).chmod(0o777)

    @classmethod
    def needs(cls, options: CodeOptions) -> Needs:
        return Needs(options.timeout_s, f"env.options.timeout_s={options.timeout_s:g}")

    def task_count(self, split: str) -> int:
        return self._count[split]

    def task(self, split: str, index: int) -> CodeProblem:
        if not 0 <= index < self._count[split]:
            raise IndexError(f"{split} problem {index} of {self._count[split]}")
        return self._problem[split](index)

    def data(self) -> list[Any]:
        """All problems; of those that a seed makes a hundred, so that no start waits until all are made."""
        count = self._count["train"]
        made = min(count, 100) if self.options.source == "generated" else count
        return [count, *map(self._problem["train"], range(made))]

    def opening(self, task: CodeProblem) -> list[ChatMessage]:
        options = self.options
        opening = [ChatMessage("system", options.system_prompt)] if options.system_prompt else []
        return [*opening, ChatMessage("user", task.question + options.instruction)]

    async def start(self) -> None:
        """Raises SandboxError, one line, where no sandbox can run."""
        await self._sandboxes.start()

    def make(self) -> CodeEnvironment:
        return CodeEnvironment(self)

    async def stop(self) -> None:
        await self._sandboxes.stop()
        self._empty.cleanup()

    async def verify(self, problem: CodeProblem, response: str) -> Verdict:
        return await self._sandboxes.run(lambda: self._verifier().verify(problem, response))

    async def changes(self, task: CodeProblem, response: str, dice: random.Random) -> list[Change]:
        return await self._sandboxes.run(lambda: changes(self._verifier(), task, response, dice))

    async def judged(self, change: Change) -> bool:
        return await replayed(self, change)

    def _verifier(self) -> CodeVerifier:
        options = self.options
        limits = Limits(
            timeout_s=options.timeout_s,
            cpu_s=options.cpu_s,
            memory_bytes=options.memory_mb << 20,
            processes=32,
            disk_bytes=64 << 20,
            file_bytes=16 << 20,
            output_bytes=80 << 20,
        )

        return CodeVerifier(
            self._sandboxes.backend, Template(Path(self._empty.name)), default_runtime().python, limits, options.case_s
        )


class CodeEnvironment:
    """One question, one response."""

    def __init__(self, family: CodeFamily) -> None:
        self._family = family

    async def reset(self, task: CodeProblem) -> list[ChatMessage]:
        self._problem = task
        return self._family.opening(task)

    async def step(self, action: str, truncated: bool = False) -> Step:
        try:
            verdict = await self._family.verify(self._problem, action)
        except SandboxError as error:
            raise RewardFailed(f"code: the tests could not be run: {error}") from error

        info = {
            "solved": float(verdict.solved),
            "tests_passed": verdict.fraction,
            "no_code": float(verdict.no_code),
            "invalid_share": float(verdict.no_code),
            "timed_out": float(verdict.timed_out),
            "out_of_memory": float(verdict.out_of_memory),
        }
        reward = verdict.fraction if self._family.options.reward == "fraction" else info["solved"]
        read = "no code" if verdict.no_code else f"{verdict.passed} of {verdict.total} tests passed"
        return Step([], reward, done=True, success=verdict.solved, info=info, notes={"read": read})

    async def gold(self) -> str | None:
        solution = self._problem.solution
        return f"```python\n{solution}\n```" if solution else None

    async def close(self) -> None:
        pass

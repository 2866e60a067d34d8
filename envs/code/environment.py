"""Single-turn programming problems: one question, one response; rewarded by the problem's tests."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from envs.code.generate import generated_problem
from envs.code.problems import CodeProblem, load_problems
from envs.code.verifier import CodeVerifier, Verdict
from envs.sandbox import Backend, BackendName, Limits, Template, make_backend
from envs.sandbox.runtime import default_runtime
from rollout.episodes.environment import ChatMessage, Step


class CodeOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    source: str = "generated"
    """`generated`, a `.jsonl` or `.parquet` file, or a hub name, in the form of MBPP, HumanEval or APPS."""
    subset: str | None = None
    """Subset of a hub data set."""
    split: str = "train"
    """Split of a hub data set to train on."""
    eval_source: str | None = None
    """Held-out problems: another file or hub name; None: the last `eval_count` rows of the source."""
    eval_split: str = "test"
    """Split of `eval_source` where that is a hub name."""
    tasks: int | None = Field(None, ge=1)
    """Training problems used, from the first; None: all (10 000 of `generated`)."""
    eval_count: int = Field(64, ge=0)
    """Held-out problems that are generated, or taken from the end of the source."""
    reward: Literal["all", "fraction"] = "all"
    """`all`: 1 if every test passes, else 0. `fraction`: the share of tests that pass."""
    system_prompt: str = ""
    """Empty: none."""
    instruction: str = "\nAnswer with one Python code block."
    """Appended to each question."""
    sandbox: BackendName = "auto"
    """`bubblewrap` or `auto`; code runs on the host's Python, so `docker` cannot serve."""
    threads: int = Field(4, ge=1)
    """Solutions verified at once by one server."""
    timeout_s: float = Field(10.0, gt=0)
    """Of all tests of one solution."""
    case_s: float = Field(4.0, gt=0)
    """Of one input of a program."""
    memory_mb: int = Field(512, ge=32)
    """Of a solution and whatever it starts."""


class CodeFamily:
    Options = CodeOptions

    def __init__(self, options: CodeOptions, seed: int) -> None:
        if options.sandbox == "docker":
            raise ValueError("sandbox='docker': code problems run on the host's Python; use 'auto' or 'bubblewrap'")
        self.options, self.seed = options, seed
        self._problem: dict[str, Callable[[int], CodeProblem]]
        if options.source == "generated":
            self._count = {"train": options.tasks or 10_000, "eval": options.eval_count}
            self._problem = {
                split: functools.partial(generated_problem, split, seed=seed) for split in ("train", "eval")
            }
        else:
            train, held_out = _load(options)
            self._count = {"train": len(train), "eval": len(held_out)}
            self._problem = {"train": train.__getitem__, "eval": held_out.__getitem__}
        self.limits = Limits(
            timeout_s=options.timeout_s, memory_bytes=options.memory_mb << 20, processes=32, disk_bytes=64 << 20,
            file_bytes=16 << 20, output_bytes=80 << 20,
        )  # fmt: skip
        self._backend: Backend | None = None
        self._empty = tempfile.TemporaryDirectory(prefix="fresco-code-")
        self._template = Template(Path(self._empty.name))
        Path(self._empty.name).chmod(0o777)
        self._threads = ThreadPoolExecutor(options.threads, "verifier")

    def task_count(self, split: str) -> int:
        return self._count[split]

    def task(self, split: str, index: int) -> CodeProblem:
        if not 0 <= index < self._count[split]:
            raise IndexError(f"{split} problem {index} of {self._count[split]}")
        return self._problem[split](index)

    async def start(self) -> None:
        """Raises SandboxError, one line, where no sandbox can run."""
        threads = self.options.threads
        self._backend = await asyncio.to_thread(make_backend, self.options.sandbox, threads, threads)

    def make(self) -> CodeEnvironment:
        return CodeEnvironment(self)

    async def stop(self) -> None:
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        if self._backend is not None:
            await asyncio.to_thread(self._backend.close)
        self._empty.cleanup()

    async def verify(self, problem: CodeProblem, response: str) -> Verdict:
        assert self._backend is not None, "start() comes first"
        options = self.options
        verifier = CodeVerifier(self._backend, self._template, default_runtime().python, self.limits, options.case_s)
        return await asyncio.get_running_loop().run_in_executor(self._threads, verifier.verify, problem, response)


class CodeEnvironment:
    def __init__(self, family: CodeFamily) -> None:
        self._family = family

    async def reset(self, task: CodeProblem) -> list[ChatMessage]:
        self._problem = task
        options = self._family.options
        opening = [ChatMessage("system", options.system_prompt)] if options.system_prompt else []
        return [*opening, ChatMessage("user", task.question + options.instruction)]

    async def step(self, action: str) -> Step:
        verdict = await self._family.verify(self._problem, action)
        info = {
            "solved": float(verdict.solved), "tests_passed": verdict.fraction, "no_code": float(verdict.no_code),
            "timed_out": float(verdict.timed_out), "out_of_memory": float(verdict.out_of_memory),
        }  # fmt: skip
        reward = verdict.fraction if self._family.options.reward == "fraction" else info["solved"]
        return Step([], reward, done=True, info=info)

    async def close(self) -> None:
        pass


def _load(options: CodeOptions) -> tuple[list[CodeProblem], list[CodeProblem]]:
    """(training, held-out) problems. Raises RowError or ValueError."""
    problems = load_problems(options.source, options.subset, options.split)
    if options.eval_source is not None:
        return problems[: options.tasks], load_problems(options.eval_source, options.subset, options.eval_split)
    if options.eval_count >= len(problems):
        raise ValueError(f"eval_count={options.eval_count}: {options.source} has only {len(problems)} problems")
    cut = len(problems) - options.eval_count
    return problems[:cut][: options.tasks], problems[cut:]

"""Maths with a verifiable answer: one question, one response; reward 1 if its last box holds the gold answer."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from envs.answers import answer_of
from envs.audit.auditor import Change, replayed, variants
from envs.audit.changes import of_latex
from envs.math import arithmetic
from envs.math.answers import last_box, typed
from envs.math.datasets import Source, load_problems
from envs.math.problems import Problem
from envs.math.verifier import Verifier
from envs.rows import RowError, is_at_hand
from envs.workers.process import RequestLost, WorkerHung, WorkerNotStarted
from rollout.episodes.environment import ChatMessage, RewardFailed, Step

INSTRUCTION = "Reason step by step, and put your final answer in \\boxed{}."


class MathOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    source: str = "arithmetic"
    """`arithmetic` (generated), files of rows, or a hub name (`openai/gsm8k`)."""
    subset: str | None = None
    """Subset of a hub dataset (`main`)."""
    split: str = "train"
    """Split of a hub dataset to train on."""
    question_field: str = "question"
    answer_field: str = "answer"
    """Gold answer: bare, after `####`, or a solution whose last `\\boxed{}` holds it."""
    type_field: str | None = None
    """Field that says the type of the answer (`ordered list`; `expression, same form`); None: the answer shows it."""
    eval_source: str | None = None
    """Held-out problems: another path or hub name; None: `eval_split` of a hub source, rows held out of a file."""
    eval_split: str = "test"
    """Split of a hub dataset for evaluation; empty: hold rows out of the training split."""
    tasks: int | None = Field(None, ge=1)
    """Training problems used, from the first; None: all (10 000 of arithmetic)."""
    eval_count: int = Field(256, ge=0)
    """Held-out problems: generated, or the last rows of the training source where there is no other."""
    system_prompt: str = ""
    """The system prompt; none if it is empty."""
    instruction: str | None = None
    """A text that is appended to each question on a line of its own; None: asks for a box, nothing for `arithmetic`."""
    verifier_workers: int = Field(1, ge=1)
    """Processes per server for symbolic answers; they start when the first such answer comes."""
    verify_cpu_s: float = Field(2.0, gt=0)
    """CPU seconds of one comparison; an answer that needs more is not trained."""


class MathFamily:
    Options: type[BaseModel] = MathOptions
    audit_s = 0.005

    def __init__(self, options: MathOptions, seed: int) -> None:
        self.options = options
        self.seed = seed
        self._count: dict[str, int]
        self._problem: dict[str, Callable[[int], Problem]]
        asks = options.instruction

        if options.source == "arithmetic":
            self._count = {"train": options.tasks or 10_000, "eval": options.eval_count}
            self._problem = {split: partial(arithmetic.problem, split, seed=seed) for split in self._count}
        else:
            problems = dict(zip(("train", "eval"), _load(options), strict=True))
            self._count = {split: len(loaded) for split, loaded in problems.items()}
            self._problem = {split: loaded.__getitem__ for split, loaded in problems.items()}
            asks = INSTRUCTION if asks is None else asks

        self.suffix = f"\n{asks}" if asks else ""
        self.verifier = Verifier(options.verifier_workers, options.verify_cpu_s)

    def task_count(self, split: str) -> int:
        return self._count[split]

    def task(self, split: str, index: int) -> Problem:
        if not 0 <= index < self._count[split]:
            raise IndexError(f"{split} problem {index} of {self._count[split]}")
        return self._problem[split](index)

    def data(self) -> list[Any]:
        """All problems; of those that a seed makes a hundred, so that no start waits until all are made."""
        count = self._count["train"]
        made = min(count, 100) if self.options.source == "arithmetic" else count
        return [count, *map(self._problem["train"], range(made))]

    def opening(self, task: Problem) -> list[ChatMessage]:
        system = self.options.system_prompt
        opening = [ChatMessage("system", system)] if system else []
        return [*opening, ChatMessage("user", task.question + self.suffix)]

    def answer_types(self) -> dict[str, list[str]]:
        """The training tasks' gold answers by their type."""
        found: dict[str, list[str]] = {}
        for index in range(self._count["train"]):
            problem = self._problem["train"](index)
            found.setdefault(typed(problem.answer, problem.asked).kind, []).append(problem.answer)
        return found

    async def start(self) -> None:
        pass

    def make(self) -> MathEnvironment:
        return MathEnvironment(self)

    async def stop(self) -> None:
        await self.verifier.stop()

    async def changes(self, task: Problem, response: str, dice: random.Random) -> list[Change]:
        answer = last_box(answer_of(response))
        if answer is None:
            return []
        before = response[: response.rfind("\\boxed")]
        gold = typed(task.answer, task.asked)
        made = of_latex(answer, gold.value.kind, task.answer)
        if gold.same_form:  # an equal value in another form is wrong then, or right, by what is asked
            made = [each for each in made if not each[1] or each[0] == "spacing"]
        return variants(task, f"{before}\\boxed{{", made, "}")

    async def judged(self, change: Change) -> bool:
        return await replayed(self, change)


class MathEnvironment:
    def __init__(self, family: MathFamily) -> None:
        self._family = family

    async def reset(self, task: Problem) -> list[ChatMessage]:
        self._task = task
        self._kind = getattr(task, "kind", "")
        return self._family.opening(task)

    async def step(self, action: str, truncated: bool = False) -> Step:
        try:
            verdict = await self._family.verifier.verify(self._task.answer, action, self._task.asked)
        except (WorkerNotStarted, WorkerHung):
            raise
        except RequestLost as error:
            raise RewardFailed(f"math's verifier: {error}") from error
        info = {name: float(value) for name, value in asdict(verdict).items()}
        info["cut_off"] = float(truncated or verdict.cut_off)
        info["invalid_share"] = float(not verdict.boxed)
        if self._kind:
            info[f"success_{self._kind}"] = info["correct"]

        box = last_box(answer_of(action))
        notes = {"expected": self._task.answer, "read": "no closed \\boxed{}" if box is None else box}
        return Step([], info["correct"], done=True, success=verdict.correct, info=info, notes=notes)

    async def gold(self) -> str | None:
        if isinstance(self._task, arithmetic.ArithmeticProblem):
            return arithmetic.solution(self._task)
        return f"\\boxed{{{self._task.answer}}}"

    async def close(self) -> None:
        pass


def _load(options: MathOptions) -> tuple[Sequence[Problem], Sequence[Problem]]:
    """(train, held-out) problems of a file or a hub. Raises RowError."""
    source = Source(
        options.source, options.question_field, options.answer_field, options.subset, options.split, options.type_field
    )
    train = load_problems(source)

    if options.eval_source is not None:
        held_out = load_problems(replace(source, name=options.eval_source, split=options.eval_split or "train"))
    elif options.eval_split and not is_at_hand(options.source):
        held_out = load_problems(replace(source, split=options.eval_split))
    else:
        if len(train) <= options.eval_count:
            raise RowError(
                f"{options.source} has {len(train)} rows: env.options.eval_count={options.eval_count} leaves none to "
                "train on; lower it or set env.options.eval_source"
            )

        kept = len(train) - options.eval_count
        held_out = train[kept:]
        train = train[:kept]

    return train[: options.tasks], held_out

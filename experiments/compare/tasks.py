"""The tasks of the comparison: two-digit addition, plainly and behind a long tail of thinking.

Thinking is counting down from a number that the question names, `#4 12 + 34` to `#3#2#112+34\\boxed{46}`. How long an
answer is lies in the question, so that no trainer can learn to be brief. With a length of its own choice, a model left
the tail within twenty steps.

Demonstrations come from a careless student, right one time in three: it loses or invents a carry, or is one off.
A model that imitates it has seen all that it needs, and what to do more of is left to reinforcement learning.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from experiments.compare.job import Job

_RIGHT = 0.33
_OPERANDS = range(10, 100)
HELD_OUT = 8
"""Questions of a run that are not trained."""
PIECE = r"#\d+|\d|\\boxed\{|[A-Za-z]+\n?|\s+|."
"""Each digit is a token, and so is each count of thinking."""


@dataclass(frozen=True)
class Task:
    name: str
    thinking: int
    """Highest count to think down from, log-uniform from 4 on; 0: none. The sum is repeated after it, so that the
    answer is near to it whatever was thought: a model of two layers does not learn to add over a distance."""
    max_tokens: int
    rows_at_once: int
    """The rows that a trainer that pads can hold."""
    sft_steps: int
    sft_batch: int
    sft_parts: int = 1
    """The parts of a batch, side by side. Another number gives another model."""
    groups: int = 16
    group_size: int = 8

    def questions(self, seed: int) -> list[tuple[str, str]]:
        """All of two two-digit numbers with their answers, in an order of its own for each seed."""
        pairs = [(left, right) for left in _OPERANDS for right in _OPERANDS]
        rng = random.Random(seed)
        rng.shuffle(pairs)
        return [(f"{self._count(rng)}{left} + {right}", str(left + right)) for left, right in pairs]

    def demonstrate(self, question: str, rng: random.Random) -> str:
        """What the start model imitates."""
        *count, left, _, right = question.split()
        answer = int(left) + int(right)
        if rng.random() > _RIGHT:
            carry_dropped = answer - 10 if int(left) % 10 + int(right) % 10 >= 10 else answer + 10
            answer = rng.choice([answer - 1, answer + 1, carry_dropped])

        thought = [f"#{number}" for each in count for number in range(int(each[1:]) - 1, 0, -1)]
        repeated = f"{left}+{right}" if count else ""
        return f"{''.join(thought)}{repeated}\\boxed{{{answer}}}"

    def _count(self, rng: random.Random) -> str:
        if not self.thinking:
            return ""
        return f"#{round(math.exp(rng.uniform(math.log(4), math.log(self.thinking))))} "


TASKS = {
    task.name: task
    for task in (
        Task("addition", thinking=0, max_tokens=16, rows_at_once=128, sft_steps=400, sft_batch=64),
        Task("long", thinking=496, max_tokens=512, rows_at_once=32, sft_steps=1000, sft_batch=64, sft_parts=2),
    )
}


def most_steps(task: Task) -> int:
    """The most steps with new questions in each."""
    return (len(_OPERANDS) ** 2 - HELD_OUT) // task.groups


def job_of(task: Task, folder: Path, model: Path, seed: int, *, lr: float, steps: int) -> Job:
    """One run in `folder`, which the run itself makes; its questions are written beside it.

    Raises ValueError where there are not enough of them for so many steps.
    """
    if steps > most_steps(task):
        raise ValueError(f"{steps} steps: there are new questions for {most_steps(task)}")

    path = folder.with_name(f"{folder.name}.questions.jsonl")
    lines = [json.dumps({"question": question, "answer": answer}) for question, answer in task.questions(seed)]
    path.write_text("\n".join(lines) + "\n")

    return Job(
        folder=folder,
        model=model,
        questions=path,
        seed=seed,
        lr=lr,
        steps=steps,
        groups=task.groups,
        group_size=task.group_size,
        max_tokens=task.max_tokens,
        rows_at_once=task.rows_at_once,
    )

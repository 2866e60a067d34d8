"""Rows of a data set behind the Environment protocol: one prompt, one response, one or several rewards.

    env.name=dataset env.options.source=rows.jsonl env.options.reward=my_module:my_reward

A reward function that raises, answers NaN, hangs or kills its process over a response masks the sample
(`RewardFailed`). A ticket that failed instead would be tried again, and the model would be spared its bad response.
None is no opinion: the other functions decide. A function that raises for the first row is refused at the start.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from pydantic import BaseModel, Field, field_validator, model_validator

from envs.answers import answer_of, tagged
from envs.audit.auditor import Change, replayed, variants
from envs.audit.changes import of_plain, value_of
from envs.dataset.judge import Judge, JudgeOptions
from envs.dataset.requests import ScoreReply, ScoreRequest
from envs.dataset.rewards import EXACT, JUDGE, load_reward, row_as_json
from envs.rows import Row, RowError, read_rows
from envs.sources import SourceOptions, split_tasks
from envs.workers.pool import Pool
from envs.workers.process import RequestLost, WorkerKind, WorkerNotStarted
from rl.config.tree import ConfigError
from rollout.episodes.environment import ChatMessage, Needs, RewardFailed, Step


class DatasetOptions(SourceOptions):
    source: str
    """Files of rows (JSON Lines, JSON, CSV, parquet; a folder, a glob), a hub name, or a function of yours
    (`my_module:rows`)."""
    eval_count: int = Field(64, ge=0)
    """Held-out tasks, the last rows of the source."""
    reward: dict[str, float]
    """Reward functions and their weights: `{"my_module:my_reward": 1.0, "exact": 0.5}`, or one name alone. `exact`
    compares with the row's `answer`; `judge` asks a language model."""
    prompt_field: str = "prompt"
    """Field of the prompt: a text, or a list of messages with `role` and `content`."""
    answer_field: str = "answer"
    """Field of the gold answer, if there is one: for `exact`, for the judge, and for `fresco env check`."""
    system_prompt: str = ""
    """The system prompt; none if it is empty."""
    instruction: str = ""
    """A text that is appended to the prompt on a line of its own."""
    success_reward: float = 1.0
    """A task counts as solved if the reward named first is at least this, before its weight."""
    judge: JudgeOptions | None = None
    """The options of the reward `judge`."""
    workers: int = Field(1, ge=1)
    """Processes per server that run reward functions."""
    reward_deadline_s: float = Field(10.0, gt=0)
    """A response over which the functions take longer is not trained: its reward has failed."""

    @field_validator("reward", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        return {value: 1.0} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _fits(self) -> DatasetOptions:
        if not self.reward:
            raise ValueError("reward names no function: `my_module:my_reward`, `exact` or `judge`")
        if (JUDGE in self.reward) != (self.judge is not None):
            raise ValueError("the reward `judge` and the options `judge` (url, model) come together")
        if self.judge is not None and self.judge.gold is not None and self.judge.gold not in self.reward:
            raise ValueError(f"judge.gold={self.judge.gold!r} is none of the rewards; a weight of 0 is allowed")
        return self


@dataclass(frozen=True)
class DatasetTask:
    opening: tuple[ChatMessage, ...]
    row: str = field(repr=False)  # JSON
    gold: str | None = field(repr=False)


class DatasetFamily:
    Options: type[BaseModel] = DatasetOptions
    audit_s = 0.02

    def __init__(self, options: DatasetOptions, seed: int) -> None:
        """Raises RowError or ConfigError for rows or rewards that cannot be used."""
        self.options = options
        self.functions = [name for name in options.reward if name != JUDGE]
        for name in self.functions:
            load_reward(name)

        def load(source: str, subset: str | None, split: str) -> list[DatasetTask]:
            return [_task(row, options) for row in read_rows(source, subset, split)]

        self._tasks = split_tasks(options, load(options.source, options.subset, options.split), load)
        self.judge = Judge(options.judge) if options.judge is not None else None
        kind = WorkerKind(
            name="a reward worker",
            module="envs.dataset.worker",
            arguments=self.functions,
            result=ScoreReply,
            deadline_s=options.reward_deadline_s,
            keeps_state=False,
        )
        self.pool: Pool[ScoreRequest, ScoreReply] = Pool(kind, options.workers)

    @classmethod
    def needs(cls, options: DatasetOptions) -> Needs:
        judge_s = options.judge.deadline_s if options.judge is not None else 0.0
        seconds = options.reward_deadline_s + judge_s
        parts = f"env.options.reward_deadline_s={options.reward_deadline_s:g}"
        return Needs(seconds, parts if not judge_s else f"{parts} and env.options.judge.deadline_s={judge_s:g}")

    def task_count(self, split: str) -> int:
        return len(self._tasks[split])

    def task(self, split: str, index: int) -> DatasetTask:
        return self._tasks[split][index]

    def opening(self, task: DatasetTask) -> list[ChatMessage]:
        return list(task.opening)

    def data(self) -> list[str]:
        return [task.row for task in self._tasks["train"]]

    async def start(self) -> None:
        """Raises ConfigError where a reward function cannot score the first row."""
        if self.judge is not None:
            await self.judge.start()
        if not self.functions:
            return
        await self.pool.start()
        first = self.task("train", 0)
        reply = await self.score(first.gold or "", first.row)
        if reply.error:
            raise ConfigError(f"env.options.reward: {reply.error}, asked about the first row")

    def make(self) -> DatasetEnvironment:
        return DatasetEnvironment(self)

    async def stop(self) -> None:
        await self.pool.stop()
        if self.judge is not None:
            await self.judge.stop()

    async def changes(self, task: DatasetTask, response: str, dice: random.Random) -> list[Change]:
        """Of the reward that decides on success: of `exact` all that is told apart, of a function of the user's own
        other numbers than the gold one."""
        first = next(iter(self.options.reward))
        said = tagged(response, "answer")
        answer = answer_of(response).strip() if said is None else said
        if task.gold is None or first == JUDGE or not answer:
            return []

        around = ("", "") if said is None else ("<answer>", "</answer>")
        made = of_plain(answer)
        if first != EXACT:
            number = value_of(answer)
            same = number is not None and number == value_of(task.gold)
            made = [each for each in made if same and not each[1] and each[0] != "one more"]  # within a tolerance
        return variants(task, around[0], made, around[1])

    async def judged(self, change: Change) -> bool:
        return await replayed(self, change)

    async def score(self, response: str, row: str) -> ScoreReply:
        """The score by the reward functions. Raises WorkerNotStarted."""
        if not self.functions:
            return ScoreReply([])
        session = self.pool.open()
        try:
            return await session.ask(ScoreRequest(response, row))
        except WorkerNotStarted:
            raise
        except RequestLost as error:
            return ScoreReply([None] * len(self.functions), f"{', '.join(self.functions)}: {error}")
        finally:
            session.end()


class DatasetEnvironment:
    def __init__(self, family: DatasetFamily) -> None:
        self._family = family

    async def reset(self, task: DatasetTask) -> list[ChatMessage]:
        self._task = task
        return self._family.opening(task)

    async def step(self, action: str, truncated: bool = False) -> Step:
        family = self._family
        options = family.options
        reply = await family.score(action, self._task.row)
        if reply.error:
            raise RewardFailed(reply.error)
        values = dict(zip(family.functions, reply.values, strict=True))
        info: dict[str, float] = {}

        if family.judge is not None:
            asked = self._task.opening[-1].content
            judgement = await family.judge.judge(asked, self._task.gold or "", action)
            values[JUDGE] = judgement.score
            info["judge_kept"] = float(judgement.kept)
            gold = family.judge.options.gold
            if gold is not None and (known := values[gold]) is not None:
                truth = known >= options.success_reward
                info["judge_agrees"] = float((judgement.score >= options.success_reward) == truth)

        answer = tagged(action, "answer")
        read = answer_of(action).strip() if answer is None and EXACT in options.reward else answer
        notes = {name: text for name, text in (("expected", self._task.gold), ("read", read)) if text is not None}
        said = {name: value for name in options.reward if (value := values[name]) is not None}
        info |= {f"reward_{name.rpartition(':')[2]}": value for name, value in said.items()}
        if not any(options.reward[name] for name in said):
            return Step([], None, done=True, success=False, info=info, notes=notes)

        reward = sum(options.reward[name] * value for name, value in said.items())
        success = next(iter(said.values())) >= options.success_reward
        return Step([], reward, done=True, success=success, info=info, notes=notes)

    async def gold(self) -> str | None:
        return self._task.gold

    async def close(self) -> None:
        pass


def _task(row: Row, options: DatasetOptions) -> DatasetTask:
    """Raises RowError, naming the row and the field."""
    opening = [ChatMessage("system", options.system_prompt)] if options.system_prompt else []
    opening += _prompt(row, options.prompt_field)
    if options.instruction:
        last = opening[-1]
        opening[-1] = ChatMessage(last.role, f"{last.content}\n{options.instruction}")

    gold = _gold(row, options)
    values = {**row.values, "answer": gold} if gold is not None else row.values
    try:
        written = row_as_json(values)
    except (TypeError, ValueError, RecursionError) as error:
        raise RowError(f"{row.where} cannot be written as JSON, which reward functions get: {error}") from None
    return DatasetTask(tuple(opening), written, None if gold is None else str(gold))


def _gold(row: Row, options: DatasetOptions) -> Any:
    """The right answer; None where there is none and no reward wants one. Raises RowError."""
    name = options.answer_field
    if row.get(name) is None and EXACT not in options.reward:
        return None

    gold = row.gold(name)
    if EXACT in options.reward and (isinstance(gold, bool) or not isinstance(gold, str | int | float | Decimal)):
        row.fail(name, f"{EXACT!r} compares texts and numbers, and this is a {type(gold).__name__}; write a reward")
    return gold


def _prompt(row: Row, name: str) -> list[ChatMessage]:
    value = row.get(name)
    if not isinstance(value, list):
        return [ChatMessage("user", row.text(name))]

    messages = []
    for each in value:
        if not isinstance(each, dict) or not all(isinstance(each.get(key), str) for key in ("role", "content")):
            row.fail(name, "a message is an object with the texts `role` and `content`")
        messages.append(ChatMessage(each["role"], each["content"]))
    if not messages:
        row.fail(name, "no message")
    return messages

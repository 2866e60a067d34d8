"""An OpenEnv server behind the Environment protocol: actions and observations are the JSON of its schema.

A server with MCP tools lists them, and an action is a call of one. Any other server has a schema of actions, and an
action is an object that fits it. A task is a seed, which the server's `reset` gets.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
from pydantic import BaseModel, ConfigDict, Field

from envs.answers import tagged
from envs.openenv.connection import ActionRefused, Connection
from rollout.episodes.environment import ChatMessage, Needs, Step

BEYOND = 1 << 30  # seeds of held-out tasks lie above
LISTING = {"type": "list_tools"}


class OpenEnvOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    url: str = Field(pattern=r"^https?://[^\s]+$")
    """The URL of the server, such as `http://127.0.0.1:8000`."""
    sessions: int = Field(1, ge=1)
    """Sessions that the server takes at once from one of our environment servers, as it declares (its
    `max_concurrent_envs`, 1 if it says nothing); `env.episodes_per_server` may not be more."""
    tasks: int = Field(10_000, ge=1, lt=BEYOND)
    """Training tasks: seeds."""
    eval_tasks: int = Field(64, ge=0, lt=BEYOND)
    """Held-out tasks: other seeds."""
    prompt: str = "Solve the task of this environment."
    """What the model is told before the first observation."""
    reset: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the server's `reset`."""
    invalid_reward: float = Field(0.0, le=0)
    """Reward of a turn without an action that the server takes."""
    success_return: float = 1.0
    """An episode that has ended with at least this sum of rewards is solved."""
    deadline_s: float = Field(14.0, gt=0)
    """Longest answer of the server."""


@dataclass(frozen=True)
class OpenEnvTask:
    seed: int


class OpenEnvFamily:
    Options: type[BaseModel] = OpenEnvOptions

    def __init__(self, options: OpenEnvOptions, seed: int) -> None:
        self.options = options
        self.url = options.url.rstrip("/")
        self.tools: list[dict[str, Any]] = []
        self.how = ""
        self._first = Random(f"{seed} {self.url}").randrange(BEYOND)
        self._http: aiohttp.ClientSession | None = None
        self.free = asyncio.Semaphore(options.sessions)

    @classmethod
    def needs(cls, options: OpenEnvOptions) -> Needs:
        room = f"env.options.sessions={options.sessions}"
        return Needs(
            2 * options.deadline_s, f"env.options.deadline_s={options.deadline_s:g}", 1, options.sessions, room
        )

    @classmethod
    def planned(cls, options: OpenEnvOptions) -> dict[str, int]:
        return {"train": options.tasks, "eval": options.eval_tasks}

    def task_count(self, split: str) -> int:
        return self.planned(self.options)[split]

    def task(self, split: str, index: int) -> OpenEnvTask:
        return OpenEnvTask((self._first + index) % BEYOND + (BEYOND if split == "eval" else 0))

    def data(self) -> list[object]:
        return [self.options.reset, self._first, self.options.tasks]

    async def start(self) -> None:
        """Raises ConnectionError where no server answers."""
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=self.options.deadline_s))
        try:
            async with self._http.get(f"{self.url}/schema") as reply:
                reply.raise_for_status()
                schema = (await reply.json())["action"]
        except (aiohttp.ClientError, OSError, KeyError, TimeoutError) as error:
            raise ConnectionError(f"env.options.url={self.options.url!r} is no OpenEnv server: {error!r}") from None

        self.tools = await self._list_tools()
        shape = {name: schema[name] for name in ("properties", "required", "$defs") if name in schema}
        call = 'as {"name": ..., "arguments": {...}}, of one of these tools: '
        told = call + json.dumps(self.tools) if self.tools else "of this schema: " + json.dumps(shape)
        self.how = f"Answer with one JSON object between <action> and </action>, {told}"

    def make(self) -> OpenEnvEnvironment:
        return OpenEnvEnvironment(self)

    async def stop(self) -> None:
        if self._http is not None:
            await self._http.close()

    def connect(self) -> Connection:
        assert self._http is not None, "start() comes first"
        return Connection(self._http, self.url)

    async def _list_tools(self) -> list[dict[str, Any]]:
        """The tools of an MCP environment; another one refuses the question."""
        connection = self.connect()
        try:
            async with asyncio.timeout(self.options.deadline_s):
                await connection.ask("reset", self.options.reset)
                answer = await connection.ask("step", LISTING)
            tools: list[dict[str, Any]] = answer.get("observation", {}).get("tools") or []
            return tools
        except ActionRefused:
            return []
        finally:
            await connection.close()


class OpenEnvEnvironment:
    def __init__(self, family: OpenEnvFamily) -> None:
        self._family = family
        self._options = family.options
        self._connection: Connection | None = None
        self._return = 0.0
        self._turns = 0
        self._invalid = 0

    async def reset(self, task: OpenEnvTask) -> list[ChatMessage]:
        await self._family.free.acquire()
        self._connection = self._family.connect()
        first = await self._ask("reset", {**self._options.reset, "seed": task.seed})
        seen = json.dumps(first.get("observation"))
        return [ChatMessage("user", f"{self._options.prompt}\n{self._family.how}\n{seen}")]

    async def step(self, action: str, truncated: bool = False) -> Step:
        self._turns += 1
        try:
            answer = await self._ask("step", self._action(action))
        except (ActionRefused, ValueError) as error:
            self._invalid += 1
            said = [ChatMessage("user", f"Refused: {error}")]
            return Step(said, self._options.invalid_reward, False, False, self._info())

        reward = None if answer.get("reward") is None else float(answer["reward"])
        done = bool(answer.get("done"))
        self._return += reward or 0.0
        success = done and self._return >= self._options.success_return
        said = [] if done else [ChatMessage("user", json.dumps(answer.get("observation")))]
        return Step(said, reward, done, success, self._info())

    async def close(self) -> None:
        connection = self._connection
        self._connection = None
        if connection is not None:
            try:
                await connection.close()
            finally:
                self._family.free.release()

    def _action(self, text: str) -> dict[str, Any]:
        """Raises ValueError, with a reason that a model may read."""
        written = tagged(text, "action")
        if written is None:
            raise ValueError("no JSON object between <action> and </action>")
        try:
            action = json.loads(written)
        except (ValueError, RecursionError):
            raise ValueError("what stands between <action> and </action> is no JSON") from None
        if not isinstance(action, dict):
            raise ValueError("what stands between <action> and </action> is no JSON object")

        if not self._family.tools:
            return action
        arguments = action.get("arguments") or {}
        return {"type": "call_tool", "tool_name": action.get("name"), "arguments": arguments}

    async def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        assert self._connection is not None, "reset() comes before step()"
        async with asyncio.timeout(self._options.deadline_s):
            return await self._connection.ask(kind, data)

    def _info(self) -> dict[str, float]:
        return {"return": self._return, "invalid_share": self._invalid / self._turns}

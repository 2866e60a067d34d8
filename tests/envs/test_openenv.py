"""OpenEnv servers: a small server that speaks the protocol of OpenEnv 0.3 (its package pins what ours cannot have)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from envs.registry import validate_options
from rl.config.schema import ConfigError, load_config
from tests.envs.playing import episode, started

SCHEMA = {"type": "object", "properties": {"add": {"type": "integer"}}, "required": ["add"]}


class Counter:
    """Count from the seed's last digit to 10; takes `sessions` at once, and closes any further one."""

    def __init__(self, sessions: int, tools: bool) -> None:
        self.sessions = sessions
        self.tools = tools
        self.open = self.most = self.refused = 0

    async def schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": SCHEMA, "observation": {}, "state": {}})

    async def talk(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.open >= self.sessions:
            self.refused += 1
            await socket.send_json({"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}})
            return socket

        self.open += 1
        self.most = max(self.most, self.open)
        count = 0
        try:
            async for message in socket:
                asked = json.loads(message.data)
                if asked["type"] == "close":
                    break
                count, answer = self.answer(count, asked["type"], asked["data"])
                await socket.send_json(answer)
        finally:
            self.open -= 1
        return socket

    def answer(self, count: int, kind: str, data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if kind == "reset":
            count = data.get("seed", 0) % 10
            return count, {"type": "observation", "data": {"observation": {"count": count}, "done": False}}
        if data.get("type") == "list_tools" and self.tools:
            listed = [{"name": "add", "description": "Adds", "input_schema": SCHEMA}]
            return count, {"type": "observation", "data": {"observation": {"tools": listed}}}

        arguments = data.get("arguments", {}) if self.tools else data
        if not isinstance(arguments.get("add"), int) or (self.tools and data.get("tool_name") != "add"):
            return count, {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "add: an integer"}}
        count += arguments["add"]
        done = count >= 10
        said = {"observation": {"count": count}, "reward": float(count == 10), "done": done}
        return count, {"type": "observation", "data": said}


@asynccontextmanager
async def counting(sessions: int = 1, tools: bool = False) -> AsyncIterator[tuple[Counter, list[str]]]:
    counter = Counter(sessions, tools)
    app = web.Application()
    app.router.add_get("/schema", counter.schema)
    app.router.add_get("/ws", counter.talk)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()

    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    limits = [f"env.options.sessions={sessions}", f"env.episodes_per_server={sessions}", "env.step_deadline_s=60"]
    try:
        yield counter, ["env.name=openenv", f"env.options.url={url}", *limits]
    finally:
        await runner.cleanup()


def test_actions_are_json_of_the_schema_and_bad_ones_are_answered() -> None:
    async def run() -> None:
        async with counting() as (counter, overrides), started(*overrides) as family:
            task = family.task("train", 0)
            turns = ["<action>{</action>", '<action>{"add": "x"}</action>', "hm", "<action>[1]</action>"]
            opening, steps, _ = await episode(
                family, task, [*turns, f'<action>{{"add": {10 - task.seed % 10}}}</action>']
            )
            assert '"count"' in opening[0].content and '"integer"' in opening[0].content
            assert ["Refused" in step.messages[0].content for step in steps[:-1]] == [True] * 4
            assert "add: an integer" in steps[1].messages[0].content
            assert (steps[-1].reward, steps[-1].done, steps[-1].success) == (1.0, True, True)
            assert steps[-1].info == {"return": 1.0, "invalid_share": 0.8}
            assert (counter.refused, counter.most) == (0, 1)

    asyncio.run(run())


def test_tools_are_listed_and_called() -> None:
    async def run() -> None:
        async with counting(tools=True) as (_, overrides), started(*overrides) as family:
            task = family.task("eval", 1)
            call = json.dumps({"name": "add", "arguments": {"add": 10 - task.seed % 10}})
            opening, (step,), _ = await episode(family, task, [f"<action>{call}</action>"])
            assert "Adds" in opening[0].content and step.success

    asyncio.run(run())


def test_no_more_sessions_are_opened_than_the_server_declares() -> None:
    async def run() -> None:
        async with counting(sessions=2) as (counter, overrides), started(*overrides) as family:
            done = '<action>{"add": 10}</action>'
            await asyncio.gather(*(episode(family, family.task("train", index), [done]) for index in range(8)))
            assert (counter.refused, counter.most) == (0, 2)

    asyncio.run(run())

    one_too_many = [
        "env.name=openenv",
        "env.options.url=http://x",
        "env.options.sessions=2",
        "env.episodes_per_server=3",
    ]
    with pytest.raises(ConfigError, match=r"env\.options\.sessions=2"):
        validate_options(load_config(None, [*one_too_many, "env.step_deadline_s=60"]))


def test_a_full_server_fails_the_episode_and_says_so() -> None:
    async def run() -> None:
        async with counting(sessions=1) as (_, overrides), started(*overrides) as family:
            holder = family.connect()  # type: ignore[attr-defined]
            await holder.ask("reset", {})
            with pytest.raises(ConnectionError, match="CAPACITY_REACHED"):
                await episode(family, family.task("train", 0), [])
            await holder.close()

    asyncio.run(run())


def test_a_server_that_is_not_there_is_said_at_the_start() -> None:
    async def run() -> None:
        overrides = ["env.name=openenv", "env.options.url=http://127.0.0.1:9", "env.episodes_per_server=1"]
        with pytest.raises(ConnectionError, match="is no OpenEnv server"):
            async with started(*overrides, "env.step_deadline_s=60"):
                pass

    asyncio.run(run())

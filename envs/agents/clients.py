"""The SDKs of OpenAI and Anthropic as one of our agents uses them: unmodified, in all the ways that real agents do.

    answer = await client.ask(history, how)     whole | stream | retry | cancel
    history += client.turn(answer, results)     the answer as this SDK gives it back, and what its tools said

`retry`: the answer is lost on its way, as in a proxy that says 503 instead, so that the SDK sends the request again by
itself. `cancel`: two equal streams begin, the first that ends is taken and the other one is given up.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from envs.agents.tool_loop import TOOLS
from rollout.episodes.environment import Endpoint, ToolCall

WAYS = ("whole", "stream", "retry", "cancel")


@dataclass(frozen=True)
class Answer:
    text: str
    calls: list[ToolCall]
    own: Any
    """The client as the SDK has it."""


class Client(ABC):
    """`tokens`: the longest answer, which one of the APIs must be told."""

    def __init__(self, sdk: Any, client: Any, endpoint: dict[str, Any], tokens: int) -> None:
        """client: the SDK's class of asynchronous clients."""
        self._losing = False
        self._tokens = tokens
        self._client = client(
            **endpoint, http_client=sdk.DefaultAsyncHttpxClient(event_hooks={"response": [self._lose]})
        )

    async def ask(self, history: list[Any], how: str) -> Answer:
        if how == "cancel":
            return await self._first(history)
        if how == "stream":
            return await self._streamed(history)
        self._losing = how == "retry"
        return await self._whole(history)

    async def close(self) -> None:
        await self._client.close()

    @abstractmethod
    def turn(self, answer: Answer, results: list[str]) -> list[Any]: ...

    @abstractmethod
    async def _whole(self, history: list[Any]) -> Answer: ...

    @abstractmethod
    async def _streamed(self, history: list[Any]) -> Answer: ...

    async def _first(self, history: list[Any]) -> Answer:
        tasks = [asyncio.create_task(self._streamed(history)) for _ in range(2)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            return next(task for task in tasks if task in done).result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _lose(self, response: Any) -> None:
        if self._losing:
            self._losing = False
            await response.aread()
            response.status_code = 503


class OpenAiClient(Client):
    def __init__(self, endpoint: Endpoint, tokens: int) -> None:
        import openai  # takes a second, which only an environment server should pay

        super().__init__(openai, openai.AsyncOpenAI, endpoint.openai, tokens)

    def turn(self, answer: Answer, results: list[str]) -> list[Any]:
        tools = [
            {"role": "tool", "tool_call_id": call.id, "content": result}
            for call, result in zip(answer.calls, results, strict=True)
        ]
        return [answer.own, *tools]

    async def _whole(self, history: list[Any]) -> Answer:
        answer = await self._create(history)
        message = answer.choices[0].message
        calls = [ToolCall(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or []]
        return Answer(message.content or "", calls, message)

    async def _streamed(self, history: list[Any]) -> Answer:
        text = ""
        parts: dict[int, dict[str, str]] = {}
        async with await self._create(history, stream=True) as stream:
            async for chunk in stream:
                for delta in (choice.delta for choice in chunk.choices):
                    text += delta.content or ""
                    for call in delta.tool_calls or []:
                        part = parts.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
                        part["id"] += call.id or ""
                        part["name"] += call.function.name or ""
                        part["arguments"] += call.function.arguments or ""

        calls = [ToolCall(part["id"], part["name"], part["arguments"]) for _, part in sorted(parts.items())]
        own: dict[str, Any] = {"role": "assistant", "content": text or None}
        if calls:
            written = [{"name": call.name, "arguments": call.arguments} for call in calls]
            own["tool_calls"] = [
                {"id": call.id, "type": "function", "function": function}
                for call, function in zip(calls, written, strict=True)
            ]
        return Answer(text, calls, own)

    async def _create(self, history: list[Any], **fields: Any) -> Any:
        limit = {"max_completion_tokens": self._tokens}
        return await self._client.chat.completions.create(
            model="policy", messages=history, tools=TOOLS, **limit, **fields
        )


class AnthropicClient(Client):
    def __init__(self, endpoint: Endpoint, tokens: int) -> None:
        import anthropic  # as above

        super().__init__(anthropic, anthropic.AsyncAnthropic, endpoint.anthropic, tokens)
        functions = [tool["function"] for tool in TOOLS]
        self._tools = [
            {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
            for each in functions
        ]

    def turn(self, answer: Answer, results: list[str]) -> list[Any]:
        blocks = [
            {"type": "tool_result", "tool_use_id": call.id, "content": result}
            for call, result in zip(answer.calls, results, strict=True)
        ]
        own = {"role": "assistant", "content": answer.own}
        return [own, {"role": "user", "content": blocks}] if blocks else [own]

    async def _whole(self, history: list[Any]) -> Answer:
        return _of_blocks((await self._client.messages.create(**self._request(history))).content)

    async def _streamed(self, history: list[Any]) -> Answer:
        async with self._client.messages.stream(**self._request(history)) as stream:
            return _of_blocks((await stream.get_final_message()).content)

    def _request(self, history: list[Any]) -> dict[str, Any]:
        return {"model": "policy", "max_tokens": self._tokens, "messages": history, "tools": self._tools}


def _of_blocks(blocks: list[Any]) -> Answer:
    calls = [ToolCall(block.id, block.name, json.dumps(block.input)) for block in blocks if block.type == "tool_use"]
    return Answer("".join(block.text for block in blocks if block.type == "text"), calls, blocks)

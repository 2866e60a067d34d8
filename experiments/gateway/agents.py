"""What agents do with their history, in every way that the forest must tell apart: scripted by a seed.

An agent is a coroutine on a `Session`. It remembers every request that it made, for the counts only: whether what is
trained was sampled is checked against the engine's own records (`experiments/gateway/fuzz.py`).
"""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace
from typing import Any

from rollout.episodes.environment import ChatMessage, ToolCall
from rollout.episodes.session import LiveAnswer, ModelAnswer, ModelRequest, Session, SessionClosed

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
_PLAIN = "the user asks a system of tools for 0 1 2 files and errors"
_STRANGE = ["é ∑", "<|im_end|>", "<tool_call>", "\n"]  # what an environment may echo
_WORDS = [*_PLAIN.split(" "), *_STRANGE]
MOST_TURNS = 6


def text(chance: random.Random) -> str:
    return " ".join(chance.choices(_WORDS, k=chance.randint(1, 8)))


def opening(chance: random.Random, with_system: bool) -> list[ChatMessage]:
    first = [ChatMessage("system", text(chance))] if with_system and chance.random() < 0.5 else []
    return [*first, ChatMessage("user", text(chance))]


class Agent:
    """`with_system`, `with_tools`: whether the template knows them."""

    def __init__(self, session: Session, chance: random.Random, *, with_system: bool, with_tools: bool) -> None:
        self._session = session
        self._chance = chance
        self._with_system = with_system
        self._tools = TOOLS if with_tools and chance.random() < 0.6 else []
        self.deeds: set[str] = set()
        self.streamed = 0  # pieces read along

    async def play(self) -> None:
        history = opening(self._chance, self._with_system)
        for _ in range(self._chance.randint(1, MOST_TURNS)):
            history = await self._one(history)

    async def _one(self, history: list[ChatMessage]) -> list[ChatMessage]:
        """Does one thing that agents do; returns the history to go on with."""
        chance = self._chance
        deed = chance.choices(
            ["append", "siblings", "parallel", "retry", "abandon", "edit", "compact", "subagent", "tools", "stop"],
            [10, 1, 1, 1, 1, 1, 1, 1, 1, 1],
        )[0]
        self.deeds.add(deed)

        match deed:
            case "siblings":
                return self._follow(history, chance.choice(await self._ask(history, answers=chance.randint(2, 3))))
            case "parallel":
                asked = list(await asyncio.gather(self._ask(history), self._ask(history)))
                return self._follow(history, chance.choice(asked)[0])

            case "retry":
                once, again = self._ask(history, is_retry=False), self._ask(history, is_retry=True)
                asked = list(await asyncio.gather(once, again))
                assert asked[0] == asked[1]
                return self._follow(history, asked[0][0])
            case "stop":
                return self._follow(history, (await self._ask(history, stop=("s", "1")))[0])

            case "abandon":
                await self._abandoned(history)
            case "edit":
                history = [self._edited(message) for message in history]
            case "compact":
                history = [*history[:1], ChatMessage("user", "so far: " + text(chance))]
            case "subagent":
                await self._ask([ChatMessage("user", "of a sub-agent: " + text(chance))])
            case "tools":
                self._tools = [] if self._tools else self._tools
        return self._follow(history, (await self._ask(history))[0])

    async def _ask(self, history: list[ChatMessage], **fields: Any) -> list[ModelAnswer]:
        limit = self._chance.choice([None, None, 3])
        chosen = fields or {"max_tokens": limit}
        told: list[list[tuple[str, str]]] = []

        def follow(live: list[LiveAnswer]) -> None:
            told.append([(each.turn.reasoning, each.turn.content) for each in live])

        stream = self._chance.random() < 0.5
        request = ModelRequest(tuple(history), self._tools, stream=stream, **chosen)
        answers = await self._session.respond(request, follow)
        for piece in told:
            for (reasoning, content), answer in zip(piece, answers, strict=True):
                message = answer.message
                assert message.reasoning.startswith(reasoning) and message.content.startswith(content), "taken back"
        self.streamed += len(told)
        return answers

    async def _abandoned(self, history: list[ChatMessage]) -> None:
        """A client that goes away while it is answered."""
        task = asyncio.create_task(self._session.respond(ModelRequest(tuple(history), self._tools, max_tokens=7)))
        await asyncio.sleep(0)
        task.cancel()
        try:
            await task
        except (asyncio.CancelledError, SessionClosed):
            pass

    def _follow(self, history: list[ChatMessage], answer: ModelAnswer) -> list[ChatMessage]:
        """The history with the answer as this client writes it, and what comes next."""
        message = answer.message
        if self._chance.random() < 0.5:
            message = replace(message, reasoning="")
        message = replace(message, calls=tuple(self._rewritten(call) for call in message.calls))
        history = [*history, message]

        if message.calls:
            return history + [ChatMessage("tool", text(self._chance), call_id=c.id, name=c.name) for c in message.calls]
        return [*history, ChatMessage("user", text(self._chance))]

    def _rewritten(self, call: ToolCall) -> ToolCall:
        """Some clients parse the arguments and write them again."""
        try:
            return replace(call, arguments=json.dumps(json.loads(call.arguments), indent=1))
        except ValueError:
            return call

    def _edited(self, message: ChatMessage) -> ChatMessage:
        if message.role != "assistant" or self._chance.random() < 0.3:
            return message
        return replace(message, content=message.content + " edited")

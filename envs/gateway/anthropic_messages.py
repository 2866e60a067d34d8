"""Anthropic Messages: `POST /v1/messages`. Reasoning is a `thinking` block, without a signature."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from envs.gateway import rules
from envs.gateway.openai_chat import Event
from envs.gateway.rules import Body
from rollout.episodes.environment import ChatMessage
from rollout.episodes.forest import RequestRefused
from rollout.episodes.session import LiveAnswer, ModelAnswer, ModelRequest

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def read(body: Body, is_retry: bool) -> ModelRequest:
    """Raises RequestRefused."""
    rules.refuse_forced(body, format_field="output_format")
    system = rules.content(body.get("system"), "system")
    messages = [ChatMessage("system", system)] if system else []
    for i, each in enumerate(rules.entries(body, "messages")):
        messages += _messages(each, f"messages[{i}]")

    tools = [_tool(each, f"tools[{i}]") for i, each in enumerate(rules.entries(body, "tools"))]
    return ModelRequest(
        tuple(messages),
        rules.offered(body, tools),
        max_tokens=rules.number(body, "max_tokens"),
        stop=rules.texts(body, "stop_sequences"),
        stream=rules.streams(body),
        is_retry=is_retry,
    )


def write(answers: list[ModelAnswer], body: Body) -> dict[str, Any]:
    (answer,) = answers
    return _head(answer.response_id, body) | {
        "content": _blocks(answer.message),
        "stop_reason": _STOP_REASONS[answer.finish_reason],
        "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
    }


class Writer:
    """The events of one stream: blocks one after the other, each begun, filled and ended."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._sent = rules.Sent()
        self._open = ""  # type of the block under way
        self._blocks = 0  # begun
        self._begun = False

    def more(self, live: list[LiveAnswer]) -> Iterator[Event]:
        """What has become certain since the last call."""
        (answer,) = live
        yield from self._begin(answer.response_id, answer.prompt_tokens)
        yield from self._grown(answer.turn.reasoning, answer.turn.content)

    def end(self, answers: list[ModelAnswer]) -> Iterator[Event]:
        """All that is left."""
        (answer,) = answers
        message = answer.message
        yield from self._begin(answer.response_id, answer.prompt_tokens)
        yield from self._grown(message.reasoning, message.content)
        if not message.content and not message.calls:
            yield from self._block({"type": "text", "text": ""})

        for call in message.calls:
            yield from self._block({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(_object(call.arguments))})
        yield from self._close()

        ended = {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        yield _event("message_delta", delta=ended, usage={"output_tokens": answer.completion_tokens})
        yield _event("message_stop")

    def _begin(self, response_id: str, prompt_tokens: int) -> Iterator[Event]:
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": prompt_tokens, "output_tokens": 0}
            message = _head(response_id, self._body) | {"content": [], "stop_reason": None, "usage": usage}
            yield _event("message_start", message=message)

    def _grown(self, reasoning: str, content: str) -> Iterator[Event]:
        thought, said = self._sent.new(reasoning, content)
        if thought:
            yield from self._block({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": thought})
        if said:
            yield from self._block({"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": said})

    def _block(self, empty: dict[str, Any]) -> Iterator[Event]:
        """Begin this block, unless it is one of text that is under way."""
        if self._open == empty["type"] != "tool_use":
            return
        yield from self._close()
        self._open = empty["type"]
        self._blocks += 1
        yield _event("content_block_start", index=self._blocks - 1, content_block=empty)

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _close(self) -> Iterator[Event]:
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._blocks - 1)


def error(status: int, message: str) -> dict[str, Any]:
    kind = {400: "invalid_request_error", 401: "authentication_error"}.get(status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _messages(entry: Body, where: str) -> list[ChatMessage]:
    """Results of tools become messages of their own; they stand before the user's text."""
    role = str(entry.get("role"))
    value = entry.get("content")
    if not isinstance(value, list):
        return [ChatMessage(role, rules.content(value, f"{where}.content"))]

    results = []
    calls = []
    reasoning = ""
    texts = []

    for i, block in enumerate(rules.entries(entry, "content")):
        place = f"{where}.content[{i}]"
        match block.get("type"):
            case "tool_result":
                text = rules.content(block.get("content"), f"{place}.content")
                results.append(ChatMessage("tool", text, call_id=str(block.get("tool_use_id") or "")))
            case "tool_use":
                calls.append(rules.tool_call(block.get("id"), block.get("name"), block.get("input"), place))

            case "thinking":
                reasoning += str(block.get("thinking") or "")
            case _:
                texts.append(rules.content([block], place))

    if results and not texts:
        return results
    return [*results, ChatMessage(role, "".join(texts), reasoning, tuple(calls))]


def _tool(entry: Body, where: str) -> dict[str, Any]:
    if not entry.get("name") or entry.get("type", "custom") != "custom":
        raise RequestRefused(f"{where}: only tools of the client's own, with a name, are supported")
    schema = entry.get("input_schema") or {"type": "object", "properties": {}}
    described = {"name": entry["name"], "description": entry.get("description") or "", "parameters": schema}
    return {"type": "function", "function": described}


def _blocks(message: ChatMessage) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if message.reasoning:
        blocks.append({"type": "thinking", "thinking": message.reasoning, "signature": ""})
    if message.content or not message.calls:
        blocks.append({"type": "text", "text": message.content})
    for call in message.calls:
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": _object(call.arguments)})
    return blocks


def _object(arguments: str) -> Any:
    """What a model wrote as a call's arguments, in an object that JSON can carry."""
    try:
        found = json.loads(arguments)
        json.dumps(found, allow_nan=False)
    except (ValueError, RecursionError):
        return {"text": arguments}
    return found if isinstance(found, dict) else {"value": found}


def _head(response_id: str, body: Body) -> dict[str, Any]:
    return {
        "id": response_id,
        "type": "message",
        "role": "assistant",
        "model": str(body.get("model") or "fresco"),
        "stop_sequence": None,
    }


def _event(kind: str, **data: Any) -> Event:
    return kind, {"type": kind, **data}

"""OpenAI Chat Completions: `POST /v1/chat/completions`.

Reasoning stands in `reasoning_content`, as most servers of open models write it, and is read there or in `reasoning`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from envs.gateway import rules
from envs.gateway.rules import Body
from rollout.episodes.environment import ChatMessage, ToolCall
from rollout.episodes.forest import RequestRefused
from rollout.episodes.session import LiveAnswer, ModelAnswer, ModelRequest

Event = tuple[str, dict[str, Any] | str]
"""Name (may be empty) and data of a server-sent event."""


def read(body: Body, is_retry: bool) -> ModelRequest:
    """Raises RequestRefused."""
    rules.refuse_forced(body)
    for name in ("functions", "function_call", "audio", "prediction"):
        if body.get(name):
            raise RequestRefused(f"{name} is not supported")
    if not isinstance(body.get("stream_options") or {}, dict):
        raise RequestRefused("stream_options: an object is wanted")

    messages = tuple(_message(each, f"messages[{i}]") for i, each in enumerate(rules.entries(body, "messages")))
    return ModelRequest(
        messages,
        rules.offered(body, [_tool(each, f"tools[{i}]") for i, each in enumerate(rules.entries(body, "tools"))]),
        answers=rules.answers_wanted(body),
        max_tokens=rules.number(body, "max_completion_tokens", "max_tokens"),
        stop=rules.texts(body, "stop"),
        stream=rules.streams(body),
        is_retry=is_retry,
    )


def write(answers: list[ModelAnswer], body: Body) -> dict[str, Any]:
    choices = [
        {"index": i, "message": _written(each.message), "finish_reason": each.finish_reason, "logprobs": None}
        for i, each in enumerate(answers)
    ]
    ids = [each.response_id for each in answers]
    return _head(ids, body, "chat.completion") | {"choices": choices, "usage": _usage(answers)}


class Writer:
    """The chunks of one stream."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._head: dict[str, Any] = {}
        self._sent: list[rules.Sent] = []

    def more(self, live: list[LiveAnswer]) -> Iterator[Event]:
        """What has become certain since the last call."""
        yield from self._begin([each.response_id for each in live])
        for i, each in enumerate(live):
            yield from self._grown(i, each.turn.reasoning, each.turn.content)

    def end(self, answers: list[ModelAnswer]) -> Iterator[Event]:
        """All that is left."""
        yield from self._begin([each.response_id for each in answers])
        for i, each in enumerate(answers):
            yield from self._grown(i, each.message.reasoning, each.message.content)
            for k, call in enumerate(each.message.calls):
                yield self._chunk(i, {"tool_calls": [{"index": k, **_call(call)}]})
            yield self._chunk(i, {}, each.finish_reason)

        options = self._body.get("stream_options") or {}
        if options.get("include_usage"):
            yield "", self._head | {"choices": [], "usage": _usage(answers)}
        yield "", "[DONE]"

    def _begin(self, ids: list[str]) -> Iterator[Event]:
        if self._sent:
            return
        self._head = _head(ids, self._body, "chat.completion.chunk")
        self._sent = [rules.Sent() for _ in ids]
        for i in range(len(ids)):
            yield self._chunk(i, {"role": "assistant", "content": ""})

    def _grown(self, i: int, reasoning: str, content: str) -> Iterator[Event]:
        thought, said = self._sent[i].new(reasoning, content)
        if thought:
            yield self._chunk(i, {"reasoning_content": thought})
        if said:
            yield self._chunk(i, {"content": said})

    def _chunk(self, i: int, delta: dict[str, Any], finish_reason: str | None = None) -> Event:
        return "", self._head | {"choices": [{"index": i, "delta": delta, "finish_reason": finish_reason}]}


def error(status: int, message: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _message(entry: Body, where: str) -> ChatMessage:
    role = entry.get("role")
    role = "system" if role == "developer" else role
    calls = []
    for i, call in enumerate(rules.entries(entry, "tool_calls")):
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        place = f"{where}.tool_calls[{i}]"
        calls.append(rules.tool_call(call.get("id"), function.get("name"), function.get("arguments"), place))

    return ChatMessage(
        role=str(role),
        content=rules.content(entry.get("content"), f"{where}.content"),
        reasoning=str(entry.get("reasoning_content") or entry.get("reasoning") or "") if role == "assistant" else "",
        calls=tuple(calls),
        call_id=str(entry.get("tool_call_id") or ""),
        name=str(entry.get("name") or "") if role == "tool" else "",
    )


def _tool(entry: Body, where: str) -> dict[str, Any]:
    function = entry.get("function")
    if entry.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
        raise RequestRefused(f"{where}: only tools of type 'function' with a name are supported")
    return {"type": "function", "function": function}


def _written(message: ChatMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
    if message.calls:
        made["content"] = message.content or None
        made["tool_calls"] = [_call(call) for call in message.calls]
    return made


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _head(ids: list[str], body: Body, kind: str) -> dict[str, Any]:
    """`fresco.responses`: the id of each choice, by which `Outcome.rewards` may reward it."""
    return {
        "id": ids[0],
        "object": kind,
        "created": int(time.time()),
        "model": str(body.get("model") or "fresco"),
        "fresco": {"responses": ids, "overridden": rules.overridden(body)},
    }


def _usage(answers: list[ModelAnswer]) -> dict[str, int]:
    read_tokens = answers[0].prompt_tokens
    sampled = sum(each.completion_tokens for each in answers)
    return {"prompt_tokens": read_tokens, "completion_tokens": sampled, "total_tokens": read_tokens + sampled}

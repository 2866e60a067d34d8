"""OpenAI Responses: `POST /v1/responses`, without the server's own memory: clients send their whole input."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from envs.gateway import openai_chat, rules
from envs.gateway.openai_chat import Event
from envs.gateway.rules import Body
from rollout.episodes.environment import ChatMessage, ToolCall
from rollout.episodes.forest import RequestRefused
from rollout.episodes.session import LiveAnswer, ModelAnswer, ModelRequest

error = openai_chat.error
_PARTS = {"reasoning": "reasoning_text", "message": "output_text"}  # type of the part of each item of text


def read(body: Body, is_retry: bool) -> ModelRequest:
    """Raises RequestRefused."""
    for name in ("previous_response_id", "conversation", "background", "prompt"):
        if body.get(name):
            raise RequestRefused(f"{name}: nothing is remembered here; send the whole input")
    text = body.get("text")
    rules.refuse_forced(
        {"format": text.get("format"), **body} if isinstance(text, dict) else body, format_field="format"
    )

    instructions = rules.content(body.get("instructions"), "instructions")
    messages = [ChatMessage("system", instructions)] if instructions else []
    given = body.get("input")
    if isinstance(given, str):
        messages.append(ChatMessage("user", given))
    else:
        messages += _messages(rules.entries(body, "input"))

    tools = [_tool(each, f"tools[{i}]") for i, each in enumerate(rules.entries(body, "tools"))]
    return ModelRequest(
        tuple(messages),
        rules.offered(body, tools),
        max_tokens=rules.number(body, "max_output_tokens"),
        stream=rules.streams(body),
        is_retry=is_retry,
    )


def write(answers: list[ModelAnswer], body: Body) -> dict[str, Any]:
    (answer,) = answers
    cut = answer.finish_reason == "length"
    tokens = {
        "input_tokens": answer.prompt_tokens,
        "output_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens_details": {"reasoning_tokens": 0},
    }

    return _head(answer.response_id, body) | {
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "output": _items(answer),
        "usage": tokens,
    }


class Writer:
    """The events of one stream: items one after the other, each added, filled and done."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self._sent = rules.Sent()
        self._name = ""  # of the response
        self._events = 0
        self._items = 0  # added
        self._kind = ""  # of the item of text that is under way: `reasoning` or `message`
        self._text = ""  # of it

    def more(self, live: list[LiveAnswer]) -> Iterator[Event]:
        """What has become certain since the last call."""
        (answer,) = live
        yield from self._begin(answer.response_id)
        yield from self._grown(answer.turn.reasoning, answer.turn.content)

    def end(self, answers: list[ModelAnswer]) -> Iterator[Event]:
        """All that is left."""
        (answer,) = answers
        message = answer.message
        yield from self._begin(answer.response_id)
        yield from self._grown(message.reasoning, message.content)
        if not message.content and not message.calls:
            yield from self._open("message")
        yield from self._close()

        for call in message.calls:
            item = _called(call)
            yield self._event("output_item.added", item=item | {"arguments": "", "status": "in_progress"})
            where = {"item_id": item["id"]}
            yield self._event("function_call_arguments.delta", **where, delta=call.arguments)
            yield self._event("function_call_arguments.done", **where, arguments=call.arguments, name=call.name)
            yield self._event("output_item.done", item=item)
            self._items += 1

        done = write(answers, self._body)
        yield self._event("completed" if done["status"] == "completed" else "incomplete", response=done)

    def _begin(self, name: str) -> Iterator[Event]:
        if not self._name:
            self._name = name
            begun = _head(name, self._body) | {"status": "in_progress", "output": [], "usage": None}
            yield self._event("created", response=begun)
            yield self._event("in_progress", response=begun)

    def _grown(self, reasoning: str, content: str) -> Iterator[Event]:
        for kind, text in zip(("reasoning", "message"), self._sent.new(reasoning, content), strict=True):
            if text:
                yield from self._open(kind)
                self._text += text
                yield self._part(f"{_PARTS[kind]}.delta", delta=text)

    def _open(self, kind: str) -> Iterator[Event]:
        """Begin this item, unless it is under way."""
        if self._kind == kind:
            return
        yield from self._close()
        self._kind = kind
        self._text = ""
        item = _written(kind, self._name, "")
        part = item["content"][0]
        yield self._event("output_item.added", item=item | {"content": [], "status": "in_progress"})
        yield self._part("content_part.added", part=part)

    def _close(self) -> Iterator[Event]:
        if self._kind:
            item = _written(self._kind, self._name, self._text)
            yield self._part(f"{_PARTS[self._kind]}.done", text=self._text)
            yield self._part("content_part.done", part=item["content"][0])
            yield self._event("output_item.done", item=item)
            self._kind = ""
            self._items += 1

    def _part(self, kind: str, **data: Any) -> Event:
        name = _written(self._kind, self._name, "")["id"]
        return self._event(kind, item_id=name, content_index=0, **data)

    def _event(self, kind: str, **data: Any) -> Event:
        self._events += 1
        of_item = {} if "response" in data else {"output_index": self._items}
        return f"response.{kind}", {
            "type": f"response.{kind}",
            "sequence_number": self._events - 1,
            **of_item,
            **({"logprobs": []} if kind.startswith("output_text") else {}),
            **data,
        }


def _messages(items: list[Body]) -> list[ChatMessage]:
    """Reasoning, text and calls of one answer are items of their own: they become one message of the assistant."""
    found: list[ChatMessage] = []
    reasoning = ""
    answered: tuple[str, list[ToolCall]] | None = None  # text and calls of the assistant's message under way

    def close() -> None:
        nonlocal reasoning, answered
        if answered is not None:
            found.append(ChatMessage("assistant", answered[0], reasoning, tuple(answered[1])))
        reasoning = ""
        answered = None

    for i, item in enumerate(items):
        where = f"input[{i}]"
        kind = item.get("type", "message")
        role = "system" if item.get("role") == "developer" else str(item.get("role"))

        if kind == "reasoning":
            close()
            reasoning = "".join(str(part.get("text") or "") for part in rules.entries(item, "content"))
        elif kind == "function_call":
            call = rules.tool_call(item.get("call_id"), item.get("name"), item.get("arguments"), where)
            answered = answered or ("", [])
            answered[1].append(call)

        elif kind == "message" and role == "assistant":
            if answered is not None:
                close()
            answered = rules.content(item.get("content"), f"{where}.content"), []

        elif kind == "message":
            close()
            found.append(ChatMessage(role, rules.content(item.get("content"), f"{where}.content")))
        elif kind == "function_call_output":
            close()
            text = rules.content(item.get("output"), f"{where}.output")
            found.append(ChatMessage("tool", text, call_id=str(item.get("call_id") or "")))
        else:
            raise RequestRefused(f"{where}: items of type {kind!r} are not supported")
    close()
    return found


def _tool(entry: Body, where: str) -> dict[str, Any]:
    if entry.get("type") != "function" or not entry.get("name"):
        raise RequestRefused(f"{where}: only tools of type 'function' with a name are supported")
    described = {name: entry[name] for name in ("name", "description", "parameters") if entry.get(name) is not None}
    return {"type": "function", "function": described}


def _items(answer: ModelAnswer) -> list[dict[str, Any]]:
    message = answer.message
    items = [_written("reasoning", answer.response_id, message.reasoning)] if message.reasoning else []
    if message.content or not message.calls:
        items.append(_written("message", answer.response_id, message.content))
    return items + [_called(call) for call in message.calls]


def _written(kind: str, name: str, text: str) -> dict[str, Any]:
    """The item of a response's reasoning, or of what it says."""
    part = {"type": _PARTS[kind], "text": text}
    if kind == "reasoning":
        return {"type": kind, "id": f"rs_{name}", "summary": [], "content": [part]}
    item = {"type": kind, "id": f"msg_{name}", "role": "assistant", "status": "completed"}
    return item | {"content": [part | {"annotations": []}]}


def _called(call: ToolCall) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{call.id}",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _head(name: str, body: Body) -> dict[str, Any]:
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "model": str(body.get("model") or "fresco"),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
    }

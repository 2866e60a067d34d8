"""What the three APIs read: contents as parts in every role, and which choices of a tool are served."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from envs.gateway import anthropic_messages, openai_chat, openai_responses, rules
from rollout.episodes.environment import ChatMessage, ToolCall
from rollout.episodes.forest import RequestRefused
from rollout.episodes.session import ModelAnswer

SCHEMA = {"type": "object", "properties": {}}
TOOLS: dict[ModuleType, dict[str, Any]] = {
    openai_chat: {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    openai_responses: {"type": "function", "name": "add", "parameters": SCHEMA},
    anthropic_messages: {"name": "add", "input_schema": SCHEMA},
}
FIELD = {openai_chat: "messages", openai_responses: "input", anthropic_messages: "messages"}


def parts(api: ModuleType, role: str) -> list[dict[str, str]]:
    """The text `one two`."""
    kind = "text" if api is not openai_responses else "output_text" if role == "assistant" else "input_text"
    return [{"type": kind, "text": "one "}, {"type": kind, "text": "two"}]


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("api", [openai_chat, openai_responses])
def test_text_parts_are_read_in_every_role_of_openai(api: ModuleType, role: str) -> None:
    entry: dict[str, Any] = {"role": role, "content": parts(api, role)}
    if role == "tool":
        entry["tool_call_id"] = "c1"
        if api is openai_responses:
            entry = {"type": "function_call_output", "call_id": "c1", "output": parts(api, role)}

    (message,) = api.read({FIELD[api]: [entry]}, False).messages
    call_id = "c1" if role == "tool" else ""
    assert message == ChatMessage("system" if role == "developer" else role, "one two", call_id=call_id)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_read_in_every_role_of_anthropic(role: str) -> None:
    said = parts(anthropic_messages, role)
    result = [{"type": "tool_result", "tool_use_id": "c1", "content": said}]
    entry = {"role": "user" if role == "tool" else role, "content": result if role == "tool" else said}
    body = {"system": said, "messages": []} if role == "system" else {"messages": [entry]}
    (message,) = anthropic_messages.read(body, False).messages
    assert message == ChatMessage(role, "one two", call_id="c1" if role == "tool" else "")


def test_instructions_are_read_as_parts_too() -> None:
    found = openai_responses.read({"instructions": parts(openai_responses, "user"), "input": "hi"}, False)
    assert found.messages == (ChatMessage("system", "one two"), ChatMessage("user", "hi"))


@pytest.mark.parametrize("api", TOOLS)
def test_a_call_is_never_forced(api: ModuleType) -> None:
    """The wish for some call is said to have no effect; one for a certain call is refused."""
    body = {FIELD[api]: [{"role": "user", "content": "hi"}], "tools": [TOOLS[api]]}
    for free in (None, "auto", {"type": "auto"}, "required", {"type": "any"}):
        assert len(api.read(body | {"tool_choice": free}, False).tools) == 1
        assert rules.overridden({"tool_choice": free}) == ["tool_choice"] * (free in ("required", {"type": "any"}))
    for none in ("none", {"type": "none"}):
        assert not api.read(body | {"tool_choice": none}, False).tools

    named = ({"type": "function", "function": {"name": "add"}}, {"type": "function", "name": "add"})
    for forced in ({"type": "tool", "name": "add"}, *named):
        with pytest.raises(RequestRefused, match="forces one tool: only 'auto' and 'none' are sampled freely"):
            api.read(body | {"tool_choice": forced}, False)


def test_one_call_at_most_is_a_wish_that_is_said_to_have_no_effect() -> None:
    assert rules.overridden({"parallel_tool_calls": False, "top_p": 0.5}) == ["top_p", "parallel_tool_calls"]
    assert rules.overridden({"parallel_tool_calls": True, "tool_choice": {"type": "auto"}}) == []
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert rules.overridden({"tool_choice": choice}) == ["tool_choice.disable_parallel_tool_use"]


@pytest.mark.parametrize("options", [True, 1, "x", [1]])
def test_options_of_a_stream_are_an_object(options: Any) -> None:
    body = {"messages": [{"role": "user", "content": "q"}], "stream": True, "stream_options": options}
    with pytest.raises(RequestRefused, match="stream_options"):
        openai_chat.read(body, False)


@pytest.mark.parametrize("arguments", ["[" * 50_000, '{"a": NaN}', '{"a": 1e999}', '{"a": -Infinity}', "no JSON"])
def test_arguments_that_no_json_can_carry_are_a_text(arguments: str) -> None:
    message = ChatMessage("assistant", calls=(ToolCall("call_1", "add", arguments),))
    written = anthropic_messages.write([ModelAnswer("resp-1", message, "tool_calls", 3, 4)], {})
    assert written["content"][0]["input"] == {"text": arguments}

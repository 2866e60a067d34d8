"""What a request may say about sampling, and what it may not: training needs the policy's own distribution.

* Overridden, and said so in the header `x-fresco-overridden`: temperature, top_p and their kin, penalties, seeds. The
  ticket decides them, as for every environment. Likewise the wish for one call at most, or for one at least
  (`tool_choice` "required", or "any"), which only the model can grant.
* Refused with status 400: what would force tokens (logit bias, a response format, a certain tool), and what no text
  model of ours reads (pictures, sound, files).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.episodes.environment import ToolCall
from rollout.episodes.forest import RequestRefused
from rollout.episodes.session import MOST_ANSWERS

Body = Mapping[str, Any]

OVERRIDDEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
    "top_logprobs",
)
_SOME_CALL = ("required", "any")  # a call, of whatever tool
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass
class Sent:
    """How much of an answer a stream has sent."""

    reasoning: int = 0
    content: int = 0

    def new(self, reasoning: str, content: str) -> tuple[str, str]:
        """What follows of both; from now on it is sent."""
        found = reasoning[self.reasoning :], content[self.content :]
        self.reasoning = len(reasoning)
        self.content = len(content)
        return found


def overridden(body: Body) -> list[str]:
    """The parameters of this request that had no effect."""
    found = [name for name in OVERRIDDEN if body.get(name) not in (None, False)]
    choice = body.get("tool_choice")
    if _kind(choice) in _SOME_CALL:
        found.append("tool_choice")
    if body.get("parallel_tool_calls") is False:
        found.append("parallel_tool_calls")
    if isinstance(choice, Mapping) and choice.get("disable_parallel_tool_use"):
        found.append("tool_choice.disable_parallel_tool_use")
    return found


def refuse_forced(body: Body, *, format_field: str = "response_format") -> None:
    """Raises RequestRefused for what would force tokens."""
    if body.get("logit_bias"):
        raise RequestRefused("logit_bias changes what is sampled, and training would be false: leave it out")
    form = body.get(format_field)
    if isinstance(form, Mapping) and form.get("type", "text") != "text":
        raise RequestRefused(f"{format_field}.type={form.get('type')!r} forces tokens: only 'text' is sampled freely")


def offered(body: Body, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that the model is shown, by `tool_choice`. Raises RequestRefused where a certain one is forced."""
    choice = body.get("tool_choice") or "auto"
    kind = _kind(choice)
    if kind == "none":
        return []
    if kind != "auto" and kind not in _SOME_CALL:
        raise RequestRefused(f"tool_choice={choice!r} forces one tool: only 'auto' and 'none' are sampled freely")
    return tools


def _kind(choice: Any) -> Any:
    return choice.get("type") if isinstance(choice, Mapping) else choice


def number(body: Body, *names: str, most: int = 1 << 31) -> int | None:
    """The first of these fields that is set, a whole number from 1 on. Raises RequestRefused."""
    for name in names:
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise RequestRefused(f"{name}={value!r}: a whole number from 1 to {most} is wanted")
        return value
    return None


def streams(body: Body) -> bool:
    return bool(body.get("stream"))


def answers_wanted(body: Body) -> int:
    return number(body, "n", most=MOST_ANSWERS) or 1


def texts(body: Body, name: str) -> tuple[str, ...]:
    """One text or a list of them. Raises RequestRefused."""
    value = body.get(name) or []
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        raise RequestRefused(f"{name}={value!r}: a text or a list of texts is wanted")
    return tuple(found)


def entries(body: Body, name: str) -> list[Body]:
    """A list of objects, empty if there is none. Raises RequestRefused."""
    found = body.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise RequestRefused(f"{name}: a list of objects is wanted")
    return found


def content(value: Any, where: str) -> str:
    """A text, or the texts of its parts. Raises RequestRefused for other parts."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise RequestRefused(f"{where}: a text or a list of parts is wanted, not {type(value).__name__}")

    found = []
    for part in value:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RequestRefused(f"{where}: parts of type {kind!r} are not read: only text is")
        found.append(part["text"])
    return "".join(found)


def tool_call(id: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    """Arguments may be JSON text or an object. Raises RequestRefused."""
    if not isinstance(id, str) or not isinstance(name, str) or not name:
        raise RequestRefused(f"{where}: a tool call has an id and a name")
    return ToolCall(id, name, arguments if isinstance(arguments, str) else json.dumps(arguments or {}))

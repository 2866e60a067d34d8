"""Whether vLLM's parsers fit a model: what the chat template writes of a turn must come back."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile

from rl.config.chat import ChatConfig
from rl.config.failures import EndsRun
from rollout.episodes.environment import ChatMessage, ToolCall, Tools
from rollout.episodes.parsing import ParsedTurn
from rollout.episodes.tokenizer import AgentTokenizer, TokenizerError

Parse = Callable[[str, str], ParsedTurn]
_TYPES = {"count": {"type": "integer"}, "word": {"type": "string"}}
_TOOLS: Tools = (
    {
        "type": "function",
        "function": {
            "name": "probe",
            "description": "a probe",
            "parameters": {"type": "object", "properties": _TYPES, "required": ["count", "word"]},
        },
    },
)
_ARGUMENTS = {"count": 1, "word": "two words"}
_CALL = ToolCall("call_1", "probe", json.dumps(_ARGUMENTS))
_THOUGHT = "first things first"
_CONTENT = "an answer"


class ParserRefused(EndsRun):
    """The parser that `chat.parser` names does not fit the model."""

    one_line = True

    def __init__(self, chat: ChatConfig, reason: str) -> None:
        fix = "name the parsers of this model, or 'plain' for agents without tools"
        super().__init__(f"chat.parser={chat.parser!r}: {' '.join(reason.split())}; {fix}")


def fitting_opener(parse: Parse, marks: tuple[str, str], chat: ChatConfig, tokenizer: AgentTokenizer) -> str:
    """The `opener` (as `TurnParser` says) with which these parsers read a turn. Raises ParserRefused.

    marks: around the reasoning. Some parsers need to see where it begins also if the prompt has written that.
    """
    assert chat.vllm_names is not None
    reasons = bool(chat.vllm_names.reasoning)
    try:
        prompt = tokenizer.written([ChatMessage("user", "q")], _TOOLS).rstrip()
        thinks = reasons and not (marks[1] and prompt.endswith(marks[1]))
        example = _example(tools=bool(chat.vllm_names.tool), thinks=thinks)
        text = _sampled(tokenizer, example)
    except TokenizerError as error:
        raise ParserRefused(chat, str(error)) from None

    opened = bool(marks[0]) and prompt.endswith(marks[0])
    if thinks and _THOUGHT not in text:  # the template drops the reasoning of earlier turns
        text = f"{'' if opened else marks[0]}{_THOUGHT}{marks[1]}{text}"

    found: list[ParsedTurn] = []
    for opener in (marks[0], "") if opened else (marks[0],):
        found.append(_parsed(parse, (opener if opened else "") + text, chat))
        if _is(found[-1], example, reasons=reasons):
            return opener
    raise ParserRefused(chat, f"it does not read {text!r}, which the chat template writes; it reads {found[0]}")


def _example(*, tools: bool, thinks: bool) -> ChatMessage:
    reasoning = _THOUGHT if thinks else ""
    return ChatMessage("assistant", "" if tools else _CONTENT, reasoning, (_CALL,) if tools else ())


def _sampled(tokenizer: AgentTokenizer, example: ChatMessage) -> str:
    """What a model would have sampled of this turn."""
    user = ChatMessage("user", "q")
    after = ChatMessage("tool", "a", call_id=_CALL.id, name=_CALL.name) if example.calls else user
    prompt = tokenizer.prompt([user], _TOOLS)
    whole = tokenizer.encode(tokenizer.written([user, example, after], _TOOLS))

    equal = takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False))
    turn = whole[sum(1 for _ in equal) :]
    ends = next((place for place, id in enumerate(turn) if id in tokenizer.stop_ids), len(turn))
    return tokenizer.turn_text(turn[:ends])


def _parsed(parse: Parse, text: str, chat: ChatConfig) -> ParsedTurn:
    try:
        return parse(text, json.dumps(_TOOLS))
    except Exception as error:
        raise ParserRefused(chat, f"{type(error).__name__}: {error}") from error


def _is(parsed: ParsedTurn, example: ChatMessage, *, reasons: bool) -> bool:
    """Whether this is the example, but for white space. Who has no parser for reasoning finds it in the content."""
    try:
        calls = [(name, json.loads(arguments)) for name, arguments in parsed.calls]
    except ValueError:
        return False
    if calls != [(call.name, json.loads(call.arguments)) for call in example.calls]:
        return False
    return not reasons or (parsed.content.strip(), parsed.reasoning.strip()) == (example.content, example.reasoning)

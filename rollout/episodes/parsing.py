"""Turns the text of a sampled turn into reasoning, content and tool calls. No torch, no model: text in, parts out.

A parser never fails on what a model wrote: what is no call stays content.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn, Protocol, runtime_checkable

from rl.config.plugins import load
from rl.config.schema import Config, ConfigError
from rl.wire.text import Mender
from rollout.episodes.environment import ChatMessage, ToolCall, Tools
from rollout.episodes.tokenizer import THINK, AgentTokenizer, TokenizerError

THINK_BEGIN, THINK_END = THINK
_CALL_BEGIN = "<tool_call>"
_MARK = re.compile(f"{THINK_BEGIN}|{_CALL_BEGIN}")
_CALL_OPENED = re.compile(r"<tool_call>\s*(?=\{)")
_CALL_CLOSED = re.compile(r"\}\s*</tool_call>")
_CALL_CLOSED_OR_CUT = re.compile(r"\}\s*(?:</tool_call>|\Z)")
_LONGEST_CALL = 100_000  # characters: a longer one stays content
TAIL = 16  # tokens at a prompt's end that may hold the opening of a turn


@dataclass(frozen=True)
class ParsedTurn:
    """`calls` are (name, arguments as JSON text) in their order."""

    content: str
    reasoning: str = ""
    calls: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SampledText:
    """What a parser is given of a turn."""

    text: str  # of what was sampled, as far as it counts
    begun: str = ""  # what the prompt has written of the turn
    tools: Tools = ()  # what it could call


class TurnParser(Protocol):
    """A parser may also have

    * `opener`, a text such as `<think>`: where a prompt ends with it, the turn's text is parsed as if it began with it;
    * `so_far`, as in `LiveParser`: without it, streams are sent when the turn is complete.
    """

    def parse(self, text: str) -> ParsedTurn:
        """`text` is that of one turn, special tokens included, without the token that ended it."""

    def example(self) -> ChatMessage | None:
        """A turn with a call that must come back when the template has written it; None: it reads no calls."""


@runtime_checkable
class LiveParser(TurnParser, Protocol):
    """A parser that can be read along."""

    def so_far(self, text: str) -> ParsedTurn:
        """What is known of a turn that goes on: beginnings of the reasoning and the content that `parse` gives,
        whatever follows.

        Nothing that may yet become a marker is told; calls are read when the turn is complete.
        """


class DistantParser(ABC):
    """A parser in another process. It has an `opener` too, and streams are sent when the turn is complete."""

    opener = ""

    @abstractmethod
    async def parsed(self, turn: SampledText) -> ParsedTurn:
        """Parse it within its deadline, whatever happens there: what could not be read stays content."""


def answer_of(text: str) -> str:
    """A turn without its thoughts: a draft inside one is no answer and no call. Empty while the first one goes on.

    Behind text, a thought that does not end is text: it may just speak of the marker.
    """
    answer = _thought(text)[1]
    said: list[str] = []
    place = 0
    while (begin := answer.find(THINK_BEGIN, place)) >= 0 and (end := answer.find(THINK_END, begin)) >= 0:
        said.append(answer[place:begin])
        place = end + len(THINK_END)
    return "".join([*said, answer[place:]])


def thought_and_answer(text: str) -> ParsedTurn:
    """A turn of an environment without tools, as the chat template writes history."""
    thought, answer, _ = _thought(text)
    return ParsedTurn(answer.lstrip("\n"), thought.strip()) if thought.strip() else ParsedTurn(text)


def _thought(text: str) -> tuple[str, str, bool]:
    """What a turn thinks before it answers, what follows, and whether the thought has ended. Several thoughts, one
    behind another, are one."""
    thoughts = []
    closed = THINK_END
    while closed and text.lstrip().startswith(THINK_BEGIN):
        thought, closed, text = text.lstrip().removeprefix(THINK_BEGIN).partition(THINK_END)
        thoughts.append(thought)
    return "".join(thoughts), text, bool(closed)


def mended(message: ChatMessage, mender: Mender) -> ChatMessage:
    """The message of a client or an environment in texts that can be encoded."""
    calls = tuple(
        ToolCall(mender.text(call.id), mender.text(call.name), mender.json(call.arguments)) for call in message.calls
    )
    said = {name: mender.text(getattr(message, name)) for name in ("content", "reasoning", "call_id", "name")}
    return replace(message, calls=calls, **said)


class PlainParser:
    """All of the turn is content."""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text)

    so_far = parse

    def example(self) -> ChatMessage | None:
        return None


class HermesParser:
    """`<think>…</think>` and `<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen2.5, Qwen3.

    A thought may also stand behind text: it is reasoning wherever it stands, and a call in it is a draft. Behind text,
    one that does not end stays content, which may just speak of the marker; no call behind that is made either.
    """

    opener = THINK_BEGIN

    def parse(self, text: str) -> ParsedTurn:
        if not text.lstrip().startswith(THINK_BEGIN):
            return _content(text)
        thought, rest, _ = _thought(text)
        return _content(rest.lstrip("\n"), thought)

    def so_far(self, text: str) -> ParsedTurn:
        begun = text.lstrip()
        if THINK_BEGIN.startswith(begun):
            return ParsedTurn("")
        if not begun.startswith(THINK_BEGIN):
            return _content(text, goes_on=True)

        thought, rest, closed = _thought(text)
        if not closed:
            thought = _thought(without_beginning(text, [THINK_END]))[0]
            return ParsedTurn("", thought.strip("\n").rstrip())
        if THINK_BEGIN.startswith(rest.lstrip()):  # another thought may follow
            return ParsedTurn("", thought.strip("\n").rstrip())
        return _content(rest.lstrip("\n"), thought, goes_on=True)

    def example(self) -> ChatMessage | None:
        return ChatMessage("assistant", calls=(ToolCall("call_1", "probe", '{"x": 1}'),))


PARSERS = {"hermes": "rollout.episodes.parsing:HermesParser", "plain": "rollout.episodes.parsing:PlainParser"}


@dataclass(frozen=True)
class TurnReader:
    """The parser of a run with the tokenizer that it fits."""

    tokenizer: AgentTokenizer
    parser: TurnParser | DistantParser

    async def parsed(self, turn: SampledText) -> ParsedTurn:
        """A parser of this process is not waited for."""
        if isinstance(self.parser, DistantParser):
            return await self.parser.parsed(turn)
        return self.parser.parse(turn.begun + turn.text)

    def message(self, parsed: ParsedTurn, name: str, mender: Mender) -> ChatMessage:
        """What a sampled turn is. name: makes the ids of its calls unique."""
        calls = tuple(
            ToolCall(f"call_{name}_{place}", mender.text(tool), mender.json(arguments))
            for place, (tool, arguments) in enumerate(parsed.calls)
        )
        return ChatMessage("assistant", parsed.content, parsed.reasoning, calls)

    def begun(self, prompt: Sequence[int]) -> str:
        """What a prompt has written of the turn that follows it: some templates open the thinking."""
        opener: str = getattr(self.parser, "opener", "")
        opened = opener and self.tokenizer.turn_text(prompt[-TAIL:]).rstrip().endswith(opener)
        return opener if opened else ""


def make_reader(config: Config, tokenizer: AgentTokenizer) -> TurnReader:
    """Raises ConfigError or TokenizerError for a parser that does not exist, or does not fit the chat template."""
    parser = make_parser(config.chat.parser)
    check_parser(parser, tokenizer)
    return TurnReader(tokenizer, parser)


def make_parser(name: str) -> TurnParser:
    """The parser that `chat.parser` names, one of this process. Raises ConfigError."""
    if name.startswith("vllm:"):
        raise ConfigError(f"chat.parser={name!r}: vLLM's parsers have a process of their own, which only a run has")
    made: TurnParser = load("chat.parser", name, PARSERS)()
    return made


def check_parser(parser: TurnParser, tokenizer: AgentTokenizer) -> None:
    """Raises TokenizerError for a parser that does not read what the template writes of a tool call.

    Its markers must also come through encoding and decoding, or no sampled call could ever be found.
    """
    example = parser.example()
    if example is None:
        return

    user = ChatMessage("user", "q")
    after = tokenizer.written([user, example, ChatMessage("tool", "a", call_id="call_1", name="probe")])
    text = tokenizer.turn_text(tokenizer.encode(after))
    wanted = [(call.name, json.loads(call.arguments)) for call in example.calls]
    found = [(name, json.loads(arguments)) for name, arguments in parser.parse(text).calls]
    if found != wanted:
        raise TokenizerError(
            f"chat.parser: {type(parser).__name__} does not read the calls that the chat template writes: {text!r}; "
            "name the parser of this model, or 'plain' for agents without tools"
        )


def without_beginning(text: str, markers: Iterable[str]) -> str:
    """The text without what, at its end, may be the beginning of one of these."""
    ends = len(text)
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), len(text) - ends, -1):
            if marker.startswith(text[-size:]):
                ends = len(text) - size
                break
    return text[:ends]


def _content(text: str, thought: str = "", *, goes_on: bool = False) -> ParsedTurn:
    """Content and calls, and the thoughts within them behind the `thought` before. Of a text that goes on: only what
    nothing that follows can change."""
    closing = _CALL_CLOSED if goes_on else _CALL_CLOSED_OR_CUT
    ends = len(without_beginning(text, [THINK_BEGIN, _CALL_BEGIN])) if goes_on else len(text)
    kept: list[str] = []
    calls: list[tuple[str, str]] = []
    place = 0
    end: re.Match[str] | None = None

    while (mark := _MARK.search(text, place)) is not None:
        begin = mark.start()
        if mark[0] == THINK_BEGIN:
            thought_ends = text.find(THINK_END, begin)
            if thought_ends < 0:
                ends = begin if goes_on else ends
                break
            kept.append(text[place:begin])
            thought += text[mark.end() : thought_ends]
            place = thought_ends + len(THINK_END)
            continue

        opened = _CALL_OPENED.match(text, begin)
        if opened is None and (not goes_on or text[begin:].strip() != _CALL_BEGIN):
            kept.append(text[place : mark.end()])
            place = mark.end()
            continue

        if opened is not None and (end is None or end.start() < opened.end()):
            end = closing.search(text, opened.end())
        if opened is None or end is None:
            ends = begin if goes_on else ends
            break

        call = _hermes_call(text[opened.end() : end.start() + 1])
        calls += [call] if call else []
        # What is no call may hold the beginning of a thought, which may reach beyond it.
        thinks = -1 if call else text.find(THINK_BEGIN, begin, end.end())
        stops = thinks if thinks >= 0 else end.end()
        kept.append(text[place : begin if call else stops])
        place = stops

    content = "".join([*kept, text[place:ends]])
    trimmed = content.rstrip() if calls or goes_on else content
    return ParsedTurn(trimmed, thought.strip("\n").rstrip(), tuple(calls))


def _hermes_call(text: str) -> tuple[str, str] | None:
    if len(text) > _LONGEST_CALL:
        return None
    try:
        call = json.loads(text, parse_constant=no_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None

    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict | str):
        return None
    try:  # Python reads 1e999 as infinite
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    return call["name"], arguments if isinstance(arguments, str) else written


def no_constant(name: str) -> NoReturn:
    """Python reads NaN and Infinity, which are no JSON: no client could read what would be sent."""
    raise ValueError(f"{name} is no JSON")

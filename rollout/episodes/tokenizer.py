"""Text to ids and back for conversations, without transformers: tokenizer.json and the model's chat template.

The ids between two turns (*glue*) are derived from the template itself, by rendering a fixed dummy conversation

    user: DUMMY_USER · assistant: DUMMY_TURN · <the new messages> · <generation prompt>

and keeping what stands after DUMMY_TURN: the end of the assistant's turn (`<|im_end|>\\n`), the messages in the
template's own form, and the opening of the next turn. So no template is special-cased, and templates that treat the
last turn differently (dropping its reasoning, say) never touch ids that were generated.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, Protocol

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from rollout.episodes.bridge import Closed, bridge_ids, closed_turn
from rollout.episodes.environment import ChatMessage, ToolCall, Tools

THINK = ("<think>", "</think>")
DUMMY_USER = "fresco dummy question"
DUMMY_TURN = "fresco dummy answer"
_CLOSED_CACHED = 1024  # sets of tools
_PROMPTS_CACHED = 64
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerError(ValueError):
    """A model folder without what a conversation needs, or messages that its chat template refuses."""


class AgentTokenizer(Protocol):
    stop_ids: list[int]
    """Ids that end a turn; a turn that ends by one of them contains it."""

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        """Ids of the opening messages and of the first turn's opening. Raises TokenizerError."""

    def glue(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        """Ids between a generated turn, which ended with `last_id`, and the next one."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of a generated turn, special tokens left out. Never raises for ids that a model produced."""

    def textless(self, ids: np.ndarray) -> np.ndarray:
        """Those of the ids that stand for no text: a padded model can sample them."""

    def turn_text(self, ids: Sequence[int]) -> str:
        """The text of a turn with special tokens (markers of tool calls are some), but without the one that ended the
        turn."""

    def raw(self, ids: Sequence[int]) -> str:
        """The text of ids with all special tokens."""

    def bridge(
        self, calls: Sequence[ToolCall], messages: Sequence[ChatMessage], last_id: int, tools: Tools = ()
    ) -> list[int]:
        """`glue` after a turn with these tool calls. Raises BridgeRefused where it cannot be known."""

    def written(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        """What the template writes for a whole conversation and the opening of the next turn. Raises TokenizerError."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text as it stands; special tokens in it count as such."""


class ChatTokenizer:
    """The tokenizer and chat template of a model folder. Raises TokenizerError if the folder has none."""

    def __init__(self, folder: Path, template_options: Mapping[str, Any] | None = None) -> None:
        """template_options: further variables of the template, such as Qwen3's `enable_thinking`."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise TokenizerError(f"{path} does not exist: conversations need a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

        settings = _read_json(folder / "tokenizer_config.json")
        self._named = _named_tokens(_read_json(folder / "special_tokens_map.json") | settings)
        self._options = dict(template_options or {})
        self._closed: dict[str, Closed] = {}  # by tools: what follows a turn without calls
        self._template = _compile(_chat_template(folder, settings))
        # The episodes of a group begin alike, and side by side.
        self._plain_prompt = lru_cache(_PROMPTS_CACHED)(lambda messages: self.encode(self.written(messages)))
        self._known = np.array(sorted(self._tokenizer.get_vocab(with_added_tokens=True).values()), np.int32)
        special = {id: token for id, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self._left_out = {id for id, token in special.items() if token.content not in THINK}
        self._special_texts = [token.content for token in special.values() if len(token.content.strip()) > 2]

        # A template may close turns with a token that the model's configuration does not list as an end
        # (base models with a chat template): it must stop generation too.
        self.stop_ids = _eos_ids(folder, self._named, self._tokenizer)
        closing = self.encode(self._after_turn([], opens_turn=False))
        ends = [id for id in closing if id in self.stop_ids or id in special]
        self.turn_end: int | None = ends[0] if ends else None
        if self.turn_end is not None and self.turn_end not in self.stop_ids:
            self.stop_ids.append(self.turn_end)

        if not self.stop_ids:
            raise TokenizerError(f"{folder} names no end-of-sequence token, nor does its chat template close turns")

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        if tools or any(message.calls for message in messages):  # arguments of calls cannot be hashed
            return self.encode(self.written(messages, tools))
        return list(self._plain_prompt(tuple(messages)))

    def written(self, messages: Sequence[ChatMessage], tools: Tools = (), *, opens_turn: bool = True) -> str:
        """What the template writes. Arguments of calls go in as an object, or as text where it refuses that."""
        try:
            return self._render(self._plain(messages, as_text=False), tools, opens_turn=opens_turn)
        except TokenizerError:
            if not any(message.calls for message in messages):
                raise
            return self._render(self._plain(messages, as_text=True), tools, opens_turn=opens_turn)

    def bridge(
        self, calls: Sequence[ToolCall], messages: Sequence[ChatMessage], last_id: int, tools: Tools = ()
    ) -> list[int]:
        def render(asked: list[ChatMessage], opens_turn: bool) -> str:
            return self.written(asked, tools, opens_turn=opens_turn)

        # Half of the work is the same for every turn without calls, whose ids are new each time.
        key = "" if calls else json.dumps(list(tools), default=str)
        closed = self._closed.get(key) or closed_turn(render, self.encode, calls)
        if key and len(self._closed) < _CLOSED_CACHED:
            self._closed[key] = closed
        return bridge_ids(render, self.encode, self.stop_ids, last_id, calls, messages, closed)

    def glue(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        ids = self.encode(self._after_turn(self._plain(messages), opens_turn=True))
        if last_id == self.turn_end:  # generated: the sequence has it already, or (Harmony) the end of a last turn
            return ids[next(place for place, id in enumerate(ids) if id in self.stop_ids) + 1 :]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The marks of a thought stay: what stands behind it is known by them."""
        return self._tokenizer.decode([id for id in ids if id not in self._left_out], skip_special_tokens=False)

    def turn_text(self, ids: Sequence[int]) -> str:
        ends = len(ids) - (len(ids) > 0 and ids[-1] in self.stop_ids)
        return self.raw(ids[:ends])

    def raw(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def textless(self, ids: np.ndarray) -> np.ndarray:
        return ids[~np.isin(ids, self._known)]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids  # the template has written them

    def _after_turn(self, messages: list[dict[str, str]], *, opens_turn: bool) -> str:
        opening = [{"role": "user", "content": DUMMY_USER}, {"role": "assistant", "content": DUMMY_TURN}]
        text = self._render([*opening, *messages], opens_turn=opens_turn)
        before, found, after = text.partition(DUMMY_TURN)
        if not found or DUMMY_USER not in before:
            raise TokenizerError("the chat template does not keep an assistant turn in its place")
        return after

    def _plain(self, messages: Sequence[ChatMessage], *, as_text: bool = False) -> list[dict[str, Any]]:
        """Messages with the texts of special tokens broken up: an environment may echo what a model wrote."""
        return [_template_message(message, self._defused, as_text) for message in messages]

    def _defused(self, content: str) -> str:
        for text in self._special_texts:
            if text in content:
                content = content.replace(text, f"{text[0]} {text[1:]}")
        return content

    def _render(self, messages: list[dict[str, Any]], tools: Tools = (), *, opens_turn: bool) -> str:
        values = {**self._named, **self._options}
        try:
            return self._template.render(
                messages=messages, tools=list(tools) or None, documents=None, add_generation_prompt=opens_turn, **values
            )
        except (jinja2.TemplateError, TypeError, AttributeError, KeyError, ValueError, RecursionError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise TokenizerError(f"the chat template refuses messages of roles ({roles}): {error}") from None


class IdTokenizer:
    """A tokenizer for runs without a model: a message's content is its ids, separated by spaces; turns have no glue."""

    def __init__(self) -> None:
        self.stop_ids: list[int] = []

    def prompt(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> list[int]:
        return self.encode(self.written(messages))

    def written(self, messages: Sequence[ChatMessage], tools: Tools = ()) -> str:
        return " ".join(message.content for message in messages)

    def encode(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            raise TokenizerError(f"without a model, messages are ids separated by spaces: {error}") from None

    def glue(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        return self.prompt(messages)

    def bridge(
        self, calls: Sequence[ToolCall], messages: Sequence[ChatMessage], last_id: int, tools: Tools = ()
    ) -> list[int]:
        return self.prompt(messages)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    turn_text = raw = decode

    def textless(self, ids: np.ndarray) -> np.ndarray:
        return ids[:0]


def load_tokenizer(model_folder: Path | None, template_options: Mapping[str, Any] | None = None) -> AgentTokenizer:
    return IdTokenizer() if model_folder is None else ChatTokenizer(model_folder, template_options)


def _template_message(message: ChatMessage, plain: Callable[[str], str], as_text: bool) -> dict[str, Any]:
    """A message as transformers and templates write messages; what a message does not have is left out."""
    made: dict[str, Any] = {"role": message.role, "content": plain(message.content)}
    if message.reasoning:
        made["reasoning_content"] = plain(message.reasoning)
    if message.call_id:
        made["tool_call_id"] = message.call_id
    if message.name:
        made["name"] = message.name

    calls = []
    for call in message.calls:
        text = plain(call.arguments)
        arguments = text if as_text else _object_or_text(text)
        function = {"name": plain(call.name), "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    return made | ({"tool_calls": calls} if calls else {})


def _object_or_text(text: str) -> Any:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def _named_tokens(settings: dict[str, Any]) -> dict[str, str]:
    values = {name: settings[name] for name in _NAMED_TOKENS if settings.get(name) is not None}
    return {name: value["content"] if isinstance(value, dict) else value for name, value in values.items()}


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template: str | list[dict[str, str]] | None = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    if not template:
        raise TokenizerError(f"{folder} has no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def _eos_ids(folder: Path, named: dict[str, str], tokenizer: Tokenizer) -> list[int]:
    configured = _read_json(folder / "generation_config.json").get("eos_token_id")
    if configured is None:
        configured = _read_json(folder / "config.json").get("eos_token_id")
    found = [] if configured is None else configured if isinstance(configured, list) else [configured]
    own = tokenizer.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return list(dict.fromkeys([*found, *([] if own is None else [own])]))


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text in templates made for training; here its body is plain output."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(source: str) -> jinja2.Template:
    """Compile as transformers compiles chat templates: sandboxed, trimmed blocks, its three helpers."""

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **layout)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)

    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TokenizerError(f"the chat template does not compile: {error}") from None

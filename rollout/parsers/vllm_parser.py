"""A tool parser and a reasoning parser of vLLM, as its own server calls them, without an engine.

All that is used of vLLM stands here. What an agent is answered is what a vLLM server would answer it, white space
included.
"""

from __future__ import annotations

import json
import logging
from functools import lru_cache
from pathlib import Path
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser.abstract_parser import DelegatingParser
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers import get_tokenizer

from rl.config.chat import ChatConfig
from rl.wire.text import whole
from rollout.episodes.parsing import ParsedTurn

_HARMONY = {"openai", "openai_gptoss"}


class VllmParser:
    """Raises what vLLM raises where the parsers do not fit each other or the tokenizer."""

    def __init__(self, chat: ChatConfig, model_folder: Path) -> None:
        assert chat.vllm_names is not None
        # A parser reports what it cannot read with a traceback for each turn.
        logging.getLogger("vllm").setLevel(logging.CRITICAL)

        names = chat.vllm_names
        self._options = dict(chat.template_options)
        self._tokenizer = get_tokenizer(str(model_folder))
        kind = ParserManager.get_parser(
            tool_parser_name=names.tool or None,
            reasoning_parser_name=names.reasoning or None,
            enable_auto_tools=True,
            model_name=str(model_folder),
            is_harmony=bool(_HARMONY & set(names)),
            tokenizer=self._tokenizer,
        )
        assert kind is not None

        self._kind = kind
        self._reads_ids = kind.parse is not DelegatingParser.parse
        reasoning = self._made([]).reasoning_parser
        self.marks = (reasoning.reasoning_start_str or "", reasoning.reasoning_end_str or "") if reasoning else ("", "")
        """Around the reasoning, as far as the parser says so."""

    def parse(self, text: str, tools: str) -> ParsedTurn:
        """tools: JSON; without any, vLLM reads no calls. Raises whatever a parser raises."""
        request = _request(tools)
        ids = self._tokenizer.encode(text, add_special_tokens=False) if self._reads_ids else ()
        reasoning, content, calls = self._made(request.tools).parse(
            text, request, enable_auto_tools=True, model_output_token_ids=ids
        )
        found = tuple((whole(call.name), _escaped(call.arguments)) for call in calls or ())
        return ParsedTurn(whole(content or ""), whole(reasoning or ""), found)

    def _made(self, tools: Any) -> Any:
        """A new one for each turn: parsers keep what they have read."""
        return self._kind(self._tokenizer, tools, chat_template_kwargs=self._options)


def _escaped(arguments: str) -> str:
    """A model may write half of a surrogate pair into JSON. No message can hold that, but its escape: the environment
    server replaces and counts it."""
    return arguments.encode(errors="backslashreplace").decode()


@lru_cache(maxsize=64)
def _request(tools: str) -> ChatCompletionRequest:
    return ChatCompletionRequest(messages=[], tools=json.loads(tools) or None)

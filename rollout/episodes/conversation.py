"""Token in, token out: a conversation as one growing sequence of ids.

    prompt · generated · glue · generated · glue · … · generated

Glue is everything between two turns. It is the end of the turn where the model did not write it (cut by length), the
environment's messages and the opening of the next turn. `GrowingSequence` says what holds for the ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import numpy as np

from rl.config.chat import ChatConfig
from rl.wire.columns import ONE_TURN, masked_columns
from rl.wire.text import Mender
from rollout.episodes.environment import ChatMessage, Opening, Tools, TurnText
from rollout.episodes.parsing import (
    TAIL,
    THINK_BEGIN,
    THINK_END,
    ParsedTurn,
    SampledText,
    TurnReader,
    thought_and_answer,
)
from rollout.episodes.sequence import GrowingSequence
from rollout.episodes.thinking import Drift, Thinking, drift, keeps_thoughts
from rollout.episodes.tokenizer import DUMMY_TURN, DUMMY_USER, AgentTokenizer, ChatTokenizer

_DEFAULTS = ChatConfig()


class Conversation(GrowingSequence):
    """One sequence in the making: `append_generated` once or more, `end_turn`, `followed`, and so on.

    thinking: `chat.thinking`; with `template` what follows a turn may be another conversation.
    """

    _tools: Tools = ()

    def __init__(
        self, tokenizer: AgentTokenizer, messages: Sequence[ChatMessage], thinking: Thinking = _DEFAULTS.thinking
    ) -> None:
        self._tokenizer = tokenizer
        self._thinking: Thinking = thinking
        self.history = list(messages)  # before the turn under way, as messages
        self._sampled: list[int] = []  # places in it of what was sampled here
        self._said = ChatMessage("assistant")  # the turn, once its text was read
        super().__init__(self._prompt(messages))
        self._asked = len(self)  # ids before the turn under way

    def append_written(self, ids: Sequence[int]) -> tuple[int, int]:
        """Add a turn that no engine has sampled, such as a demonstrator's: masked values stand beside its ids."""
        made = masked_columns({"token": len(ids), **ONE_TURN}, "generator")
        return self.append_generated(made | {"token_ids": np.array(ids, np.int32)})

    def append_messages(self, messages: Sequence[ChatMessage], limit: int) -> bool:
        """Add the environment's answer and open the next turn; False, and nothing added, if that passes `limit` ids."""
        glue = self._between(messages, int(self.context()[-1]))
        if len(self) + len(glue) > limit:
            return False

        self.append_read(glue)
        return True

    def followed(self, messages: Sequence[ChatMessage], limit: int) -> Self | None:
        """What goes on after the environment's answer to a turn whose text was read; None if it passes `limit` ids.

        That is this conversation. It is a new one, of what the template writes, where that drops a thought of this one
        and `thinking="template"`.
        """
        history = [*self.history, self._said, *messages]
        sampled = [*self._sampled, len(self.history)]
        if self._thinking == "template" and not keeps_thoughts(self._tokenizer, history, sampled, self._tools):
            new = self._begun(history)
            return new if len(new) <= limit else None

        if not self.append_messages(messages, limit):
            return None
        self.history = history
        self._sampled = sampled
        self._asked = len(self)
        return self

    def drift(self) -> Drift:
        """How it differs from what the template writes, up to its last turn."""
        return drift(self._tokenizer, self.context()[: self._asked].tolist(), self.history, self._tools)

    def text(self, start: int, end: int) -> str:
        """The decoded text of a turn; where the prompt has opened a thought, with the marker that did so."""
        context = self.context()
        before = self._tokenizer.decode(context[max(0, start - TAIL) : start].tolist())
        begun = THINK_BEGIN if before.rstrip().endswith(THINK_BEGIN) else ""
        text = begun + self._tokenizer.decode(context[start:end].tolist())
        parsed = thought_and_answer(text)
        self._said = ChatMessage("assistant", parsed.content, parsed.reasoning)
        return text

    def _begun(self, messages: Sequence[ChatMessage]) -> Self:
        return type(self)(self._tokenizer, messages, self._thinking)

    def _prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self._tokenizer.prompt(messages)

    def _between(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        return self._tokenizer.glue(messages, last_id)


class ToolConversation(Conversation):
    """A conversation with tools: turns are parsed, and what follows a turn depends on what it called."""

    def __init__(self, reader: TurnReader, opening: Opening, thinking: Thinking, mender: Mender) -> None:
        self.reader = reader
        self._tools = opening.tools
        self._mender = mender
        super().__init__(reader.tokenizer, opening.messages, thinking)

    def sampled(self, start: int, end: int) -> SampledText:
        """What a parser is to read of a turn."""
        context = self.context()
        text = self.reader.tokenizer.turn_text(context[start:end].tolist())
        return SampledText(text, self.reader.begun(context[:start].tolist()), self._tools)

    def read(self, sampled: SampledText, parsed: ParsedTurn) -> TurnText:
        """The text of the last turn with its message."""
        text = TurnText(sampled.text)
        turns = sum(message.role == "assistant" for message in self.history)
        self._said = text.message = self.reader.message(parsed, f"{turns}", self._mender)
        return text

    def _begun(self, messages: Sequence[ChatMessage]) -> Self:
        return type(self)(self.reader, Opening(list(messages), self._tools), self._thinking, self._mender)

    def _prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.reader.tokenizer.prompt(messages, self._tools)

    def _between(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        return self.reader.tokenizer.bridge(self._said.calls, messages, last_id, self._tools)


def template_drift(tokenizer: AgentTokenizer, thinking: Thinking) -> str:
    """Where ids of a conversation, put together turn by turn, are not what the template writes; empty: nowhere.

    Where the template decides what becomes of thoughts, a turn with one is tried as well.
    """
    if not isinstance(tokenizer, ChatTokenizer):
        return ""
    user = ChatMessage("user", DUMMY_USER)
    thought = f"{THINK_BEGIN}\nfresco dummy thought\n{THINK_END}\n\n{DUMMY_TURN}"
    for turn in (DUMMY_TURN, thought) if thinking == "template" else (DUMMY_TURN,):
        conversation = Conversation(tokenizer, [user], thinking)
        conversation.text(*conversation.append_written(tokenizer.encode(turn)))
        following = conversation.followed([user], limit=1 << 31)
        if following is not None and following.drift() == "text":
            ours = tokenizer.turn_text(following.context().tolist())
            return f"turn by turn {ours!r}, as a whole {tokenizer.written(following.history)!r}"
    return ""

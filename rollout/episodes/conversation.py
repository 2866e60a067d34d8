"""Token in, token out: a conversation as one growing sequence of ids.

    prompt · generated · glue · generated · glue · … · generated

Glue is everything between two turns. It is the end of the turn where the model did not write it (cut by length), the
environment's messages and the opening of the next turn. `GrowingSequence` says what holds for the ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.wire.columns import ONE_TURN, masked_columns
from rollout.episodes.environment import ChatMessage, Opening, ToolCall, TurnText
from rollout.episodes.parsing import TAIL, THINK_BEGIN, ParsedTurn, SampledText, TurnReader
from rollout.episodes.sequence import GrowingSequence
from rollout.episodes.tokenizer import ConversationTokenizer


class Conversation(GrowingSequence):
    """One sequence in the making: `append_generated` once or more, `end_turn`, `append_messages`, and so on."""

    def __init__(self, tokenizer: ConversationTokenizer, messages: Sequence[ChatMessage]) -> None:
        self._tokenizer = tokenizer
        super().__init__(self._prompt(messages))

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

    def text(self, start: int, end: int) -> str:
        """The decoded text of a turn; where the prompt has opened a thought, with the marker that did so."""
        context = self.context()
        before = self._tokenizer.decode(context[max(0, start - TAIL) : start].tolist())
        begun = THINK_BEGIN if before.rstrip().endswith(THINK_BEGIN) else ""
        return begun + self._tokenizer.decode(context[start:end].tolist())

    def _prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self._tokenizer.prompt(messages)

    def _between(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        return self._tokenizer.glue(messages, last_id)


class ToolConversation(Conversation):
    """A conversation with tools: turns are parsed, and what follows a turn depends on what it called."""

    def __init__(self, reader: TurnReader, opening: Opening) -> None:
        self.reader = reader
        self._tools = opening.tools
        self._calls: tuple[ToolCall, ...] = ()  # of the last turn
        super().__init__(reader.tokenizer, opening.messages)

    def sampled(self, start: int, end: int) -> SampledText:
        """What a parser is to read of a turn."""
        context = self.context()
        text = self.reader.tokenizer.turn_text(context[start:end].tolist())
        return SampledText(text, self.reader.begun(context[:start].tolist()), self._tools)

    def read(self, sampled: SampledText, parsed: ParsedTurn) -> TurnText:
        """The text of the last turn with its message."""
        text = TurnText(sampled.text)
        text.message = self.reader.message(parsed, f"{len(self.turns)}")
        self._calls = text.message.calls
        return text

    def _prompt(self, messages: Sequence[ChatMessage]) -> list[int]:
        return self.reader.tokenizer.prompt(messages, self._tools)

    def _between(self, messages: Sequence[ChatMessage], last_id: int) -> list[int]:
        return self.reader.tokenizer.bridge(self._calls, messages, last_id, self._tools)

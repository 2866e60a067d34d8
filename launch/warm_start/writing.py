"""Turns that somebody else has written, as the ids of an episode in which the model had written them.

The very `Conversation` of an episode puts them together, so the model is trained on the ids that it will see and has to
write, whatever its chat template does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.config.chat import ChatConfig
from rollout.episodes.conversation import Conversation
from rollout.episodes.environment import ChatMessage
from rollout.episodes.parsing import TAIL, THINK_BEGIN, THINK_END
from rollout.episodes.thinking import Thinking
from rollout.episodes.tokenizer import ChatTokenizer, TokenizerError

Turn = tuple[ChatMessage, Sequence[ChatMessage]]
"""What the model writes, and what it is answered."""


@dataclass(frozen=True)
class Written:
    """One sequence: its ids, and the span of each turn with the turn's number in the episode."""

    ids: list[int]
    turns: list[tuple[int, int, int]]


def written(
    tokenizer: ChatTokenizer,
    opening: Sequence[ChatMessage],
    turns: Sequence[Turn],
    limit: int,
    thinking: Thinking = ChatConfig().thinking,
) -> list[Written] | None:
    """The sequences of the episode; None if it is longer than `limit`. `thinking` is `chat.thinking`.

    Raises TokenizerError where the template refuses the messages, or where a turn holds a token that would end it.
    """
    conversation = Conversation(tokenizer, opening, thinking)
    sequences = [(conversation, Written([], []))]
    for number, (message, answer) in enumerate(turns):
        span = conversation.append_written(_turn_ids(tokenizer, conversation, message))
        sequences[-1][1].turns.append((*span, number))
        conversation.text(*span)
        if number == len(turns) - 1:
            break

        following = conversation.followed(list(answer), limit)
        if following is None:
            return None
        if following is not conversation:
            conversation = following
            sequences.append((conversation, Written([], [])))

    for each, found in sequences:
        found.ids.extend(each.context().tolist())
    return None if any(len(found.ids) > limit for _, found in sequences) else [found for _, found in sequences]


def _turn_ids(tokenizer: ChatTokenizer, conversation: Conversation, message: ChatMessage) -> list[int]:
    text = message.content
    if message.reasoning:
        before = tokenizer.raw(conversation.context()[-TAIL:].tolist())
        opener = "" if before.rstrip().endswith(THINK_BEGIN) else f"{THINK_BEGIN}\n"
        text = f"{opener}{message.reasoning.strip()}\n{THINK_END}\n\n{text}"
    ids = tokenizer.encode(text)
    if ends := sorted(set(ids) & set(tokenizer.stop_ids)):
        raise TokenizerError(f"a turn holds the text {tokenizer.raw(ends[:1])!r}, which would end it; leave it out")
    return [*ids, tokenizer.stop_ids[0] if tokenizer.turn_end is None else tokenizer.turn_end]

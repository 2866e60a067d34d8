"""A conversation beside what the chat template writes for it: old thoughts, and drift.

Many templates drop what an assistant thought before it answered, once another message follows. Sampled ids then hold
more than the model will read of its history in use. `chat.thinking` says which of the two is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from rollout.episodes.bridge import SENTINEL
from rollout.episodes.environment import ChatMessage, Tools
from rollout.episodes.tokenizer import AgentTokenizer

Thinking = Literal["keep", "template"]
Drift = Literal["none", "ids", "text"]


def keeps_thoughts(
    tokenizer: AgentTokenizer, history: Sequence[ChatMessage], sampled: Sequence[int], tools: Tools = ()
) -> bool:
    """Whether the template still writes the thoughts of the messages at these places of a history."""
    thoughts = {place: f"{SENTINEL}{place}." for place in sampled if history[place].reasoning}
    if not thoughts:
        return True
    marked = [
        replace(each, reasoning=thoughts[place]) if place in thoughts else each for place, each in enumerate(history)
    ]
    try:
        text = tokenizer.written(marked, tools)
    except ValueError:
        return False
    return all(mark in text for mark in thoughts.values())


def drift(tokenizer: AgentTokenizer, ids: list[int], history: Sequence[ChatMessage], tools: Tools = ()) -> Drift:
    """How the ids of a conversation that grew turn by turn differ from what the template writes for its history.

    `ids`: the same text in other tokens; `text`: the template writes the history differently.
    """
    try:
        written = tokenizer.encode(tokenizer.written(history, tools))
    except ValueError:
        return "text"
    if written == ids:
        return "none"
    return "ids" if tokenizer.turn_text(ids) == tokenizer.turn_text(written) else "text"

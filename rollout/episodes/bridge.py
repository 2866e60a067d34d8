"""The ids between a sampled turn and the next prompt, for any chat template.

A stand-in conversation is rendered twice, closed after the turn and with the new messages:

    user: q · assistant: SENTINEL (or calls whose arguments are SENTINEL) · <new messages> · <opening of the next turn>

What follows the last sentinel, from the first token on that ends a turn, is what the template writes between the two.
So no sampled text is ever encoded again, and whatever a template does to its last turn cannot touch sampled ids.
Where the two renderings contradict each other the bridge is refused, and the history becomes a new root.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.episodes.environment import ChatMessage, ToolCall

SENTINEL = "FrescoSentinel7f3a"  # in no template; ASCII, as JSON may escape other letters

_USER = ChatMessage("user", "q")

Render = Callable[[list[ChatMessage], bool], str]
"""(messages, whether the next turn is opened) -> text. Raises ValueError for messages that the template refuses."""


class BridgeRefused(Exception):
    """What stands between the turns cannot be known; the message says why."""


@dataclass(frozen=True)
class Closed:
    """What the template writes after a turn that nothing follows."""

    sentinels: int
    ids: tuple[int, ...]


def closed_turn(render: Render, encode: Callable[[str], list[int]], calls: Sequence[ToolCall]) -> Closed:
    """The first rendering, of a turn that made these calls. Raises BridgeRefused."""
    try:
        text = render([_USER, _stand_in(calls)], False)
    except ValueError as error:
        raise BridgeRefused(f"the template refuses the turn: {error}") from None
    return Closed(text.count(SENTINEL), tuple(encode(text.rpartition(SENTINEL)[2])))


def bridge_ids(
    render: Render,
    encode: Callable[[str], list[int]],
    stop_ids: Sequence[int],
    last_id: int,
    calls: Sequence[ToolCall],
    messages: Sequence[ChatMessage],
    closed: Closed,
) -> list[int]:
    """Ids between a turn that ended with `last_id` and called `calls`, and the turn after `messages`.

    closed: as `closed_turn` said for these calls. Raises BridgeRefused.
    """
    try:
        opened = render([_USER, _stand_in(calls), *messages], True)
    except ValueError as error:
        raise BridgeRefused(f"the template refuses the messages: {error}") from None
    if not closed.sentinels or opened.count(SENTINEL) != closed.sentinels:
        raise BridgeRefused("the template does not write the turn, or writes it elsewhere once messages follow")

    following = encode(opened.rpartition(SENTINEL)[2])
    end = next((place for place, id in enumerate(following) if id in stop_ids), None)
    if end is None:
        raise BridgeRefused("no stop token stands between the turns")
    if tuple(following[:end]) != closed.ids[:end]:
        raise BridgeRefused("the turn is closed differently once messages follow it")

    # The stop token closes the turn, or (GLM) opens the next message: the same to us. Harmony ends a conversation with
    # another one than a turn within it.
    stop = following[end]
    own = next((id for id in closed.ids if id in stop_ids), None)
    if last_id == stop or (last_id == own and own != stop):
        return following[end + 1 :]
    if last_id in stop_ids:
        raise BridgeRefused(f"the turn ended with the token {last_id}, where the template writes {stop}")
    return following[end:]  # cut by a limit, a stop text or an abort: the turn is closed for it, masked


def _stand_in(calls: Sequence[ToolCall]) -> ChatMessage:
    """The turn with its call ids and names, and the sentinel for everything else that the model wrote."""
    if not calls:
        return ChatMessage("assistant", SENTINEL)
    arguments = json.dumps({"s": SENTINEL})
    return ChatMessage("assistant", calls=tuple(ToolCall(call.id, call.name, arguments) for call in calls))

"""Conversations to be imitated: the rows that `fresco sft` trains on. Nothing is played here.

A row has `messages`, a list of `role` and `content`, and every turn of the assistant in it is learned. Or it has
`prompt` and `completion`, each a text or such a list, and only the completion is learned. A turn may have its thought
beside it, in `reasoning_content` (or `reasoning`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, Field

from envs.rows import Row, read_rows
from envs.sources import SourceOptions, split_tasks
from rollout.episodes.environment import ChatMessage, Environment

NAME = "envs.chat:ChatFamily"
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ChatOptions(SourceOptions):
    source: str
    """Files of rows (JSON Lines, JSON, CSV, parquet; a folder, a glob), a hub name, or a function of yours
    (`my_module:rows`)."""
    eval_count: int = Field(0, ge=0)
    """Held-out rows, the last ones of the source."""


@dataclass(frozen=True)
class Imitated:
    """One row: messages, of which the turns of the assistant from `first` on are learned."""

    messages: tuple[ChatMessage, ...]
    first: int
    where: str = field(repr=False)


class ChatFamily:
    Options: type[BaseModel] = ChatOptions
    imitated = True

    def __init__(self, options: ChatOptions, seed: int) -> None:
        """Raises RowError for rows that are no conversations."""
        self.options = options

        def load(source: str, subset: str | None, split: str) -> list[Imitated]:
            return [_imitated(row) for row in read_rows(source, subset, split)]

        self._rows = split_tasks(options, load(options.source, options.subset, options.split), load)

    def task_count(self, split: str) -> int:
        return len(self._rows[split])

    def task(self, split: str, index: int) -> Imitated:
        return self._rows[split][index]

    def data(self) -> Iterator[str]:
        """What is learned, wherever it stands."""
        return map(repr, self._rows["train"])

    def make(self) -> Environment:
        raise NotImplementedError("conversations are imitated, not played: fresco sft")

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass


def _imitated(row: Row) -> Imitated:
    """Raises RowError, naming the row and the field."""
    name, first = "messages", 0
    if row.has(name):
        messages = _messages(row, name, "")
    elif row.has("prompt") or row.has("completion"):
        opening = _messages(row, "prompt", "user")
        first, name = len(opening), "completion"
        messages = [*opening, *_messages(row, name, "assistant")]
    else:
        row.miss(name, "prompt")

    while messages[-1:] and messages[-1].role != "assistant":  # nothing is learned behind the last turn
        messages.pop()
    if len(messages) <= first:
        row.fail(name, "no message of the role assistant: there is nothing to learn")
    if messages[0].role == "assistant":
        row.fail(name, "it begins with a turn of the assistant; a message of the user must stand before it")
    for place, (one, following) in enumerate(pairwise(messages), 1):
        if one.role == following.role == "assistant":
            row.fail(name, f"messages {place} and {place + 1} are both the assistant's; make one of them")
    return Imitated(tuple(messages), first, row.where)


def _messages(row: Row, name: str, role: str) -> list[ChatMessage]:
    """role: whose a text alone is; empty: it must be a list."""
    if not row.has(name):
        row.miss(name)
    value = row.get(name)
    if isinstance(value, str) and role:
        return [ChatMessage(role, value)]
    if not isinstance(value, list):
        row.fail(name, "it is no list of messages, {role, content} each" + (", and no text" if role else ""))
    return [_message(row, name, place, each) for place, each in enumerate(value, 1)]


def _message(row: Row, name: str, place: int, value: Any) -> ChatMessage:
    if not isinstance(value, dict):
        row.fail(name, f"message {place} is no object with `role` and `content`")
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        row.fail(name, f"message {place} has role={role!r}; one of {', '.join(_ROLES)}")
    if value.get("tool_calls"):
        row.fail(name, f"message {place} has tool_calls, which are not imitated; write the call into its content")

    if not isinstance(content, str):
        row.fail(name, f"message {place} has content={str(content)[:40]!r}, which is no text")
    thought = value.get("reasoning_content") or value.get("reasoning") or ""
    if not isinstance(thought, str):
        row.fail(name, f"message {place} has a reasoning_content that is no text")
    return ChatMessage(role, content, thought)

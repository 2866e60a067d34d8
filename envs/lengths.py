"""Whether prompts fit into the context, asked of the run's own tokenizer before anything starts.

A token has at least one byte, so that most prompts need not be encoded to be known as short enough. Of the others the
longest come first, within a bound of time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envs.mixture import MixtureFamily
from rl.config.schema import Config, ConfigError
from rollout.episodes.environment import ChatMessage
from rollout.episodes.tokenizer import AgentTokenizer, TokenizerError, load_tokenizer

MOST_S = 10.0  # for the prompts of one environment
_NAMED = 5


@dataclass
class _Measured:
    """Prompts of one environment, by their number from 1 on, with their tokens."""

    what: str
    count: int
    never: dict[int, int] = field(default_factory=dict)  # no token of an answer has room
    short: dict[int, int] = field(default_factory=dict)  # less than the longest answer has
    unknown: int = 0  # that were not looked at in time

    def told(self, found: dict[int, int]) -> str:
        rows = sorted(found)
        named = ", ".join(map(str, rows[:_NAMED])) + (", …" if rows[_NAMED:] else "")
        row = min(found, key=lambda row: (-found[row], row))
        least = "at least " if self.unknown else ""
        return f"{least}{len(rows)} of {self.count} {self.what} (rows {named}; row {row} has {found[row]} tokens)"


def check_lengths(config: Config, family: Any, model_folder: Path) -> None:
    """For environments that can tell an `opening(task)` before they play. Prompts that cannot be answered are refused,
    and those that leave less than the longest answer are told. Raises ConfigError."""
    tokenizer: AgentTokenizer | None = None
    limit = config.generator.max_model_len
    for label, each, tokens in _families(config, family):
        if not callable(getattr(each, "opening", None)):
            continue
        try:
            tokenizer = tokenizer or load_tokenizer(model_folder, config.chat.template_options)
            found = [_measured(label, each, split, tokenizer, limit, tokens) for split in ("train", "eval")]
        except TokenizerError as error:
            raise ConfigError(f"model.path={config.model.path!r}: {error}") from None

        for measured in found:
            if measured.never:
                told = f"{measured.told(measured.never)} do not fit into generator.max_model_len={limit}"
                raise ConfigError(f"{told}; raise it, or leave these rows out of the data")
            if measured.short:
                told = f"{measured.told(measured.short)} leave less than {tokens} tokens for an answer"
                fix = "they may be cut: raise it, or lower sampling.max_tokens"
                print(f"! {told} in generator.max_model_len={limit}; {fix}", file=sys.stderr)
            if measured.unknown:
                rest = f"{measured.unknown} more that may be too long were not measured within {MOST_S:g} s"
                print(f"! of {measured.count} {measured.what} {rest}", file=sys.stderr)


def _families(config: Config, family: Any) -> Iterator[tuple[str, Any, int]]:
    """Each environment with its name among others and its longest answer."""
    longest = config.sampling.max_tokens
    if not isinstance(family, MixtureFamily):
        yield "", family, longest
        return
    for label, member in family.members.items():
        yield f"{label}'s ", member.family, min(longest, member.terms.max_tokens or longest)


def _measured(label: str, family: Any, split: str, tokenizer: AgentTokenizer, limit: int, answer: int) -> _Measured:
    count = family.task_count(split)
    found = _Measured(f"{label}{'training' if split == 'train' else 'held-out'} prompts", count)
    if not count:
        return found

    first = family.opening(family.task(split, 0))
    frame = len(tokenizer.written(first).encode()) - _bytes(first)
    sizes = ((_bytes(family.opening(family.task(split, index))), index) for index in range(count))
    suspects = sorted(((size, index) for size, index in sizes if size + frame > limit - answer), reverse=True)

    until = time.monotonic() + MOST_S
    for done, (_, index) in enumerate(suspects):
        if time.monotonic() > until:
            found.unknown = len(suspects) - done
            break
        tokens = len(tokenizer.encode(tokenizer.written(family.opening(family.task(split, index)))))
        if tokens >= limit:
            found.never[index + 1] = tokens
        elif tokens > limit - answer:
            found.short[index + 1] = tokens
    return found


def _bytes(messages: list[ChatMessage]) -> int:
    return sum(len(message.content.encode()) for message in messages)

"""What a generator had delivered of a response before it died or lost it: another goes on from there, and the client
sees one response.

Generators send what a long response has grown by with their status. While a request runs, its delivered tokens are kept
here; when its generator dies they become the end of its prompt, and at last the beginning of its answer.
"""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from rl.wire.columns import declared
from rl.wire.messages import Generate, ProtocolError, Version

Columns = dict[str, np.ndarray]
_ALWAYS = ("token_ids", "logp_behavior", "policy_version")


class Continuations:
    """What goes on after a death, by the core's key; what `answer` or `sent` has ended is forgotten."""

    def __init__(self) -> None:
        self._delivered: dict[int, Columns] = {}  # by the generator that runs the request
        self._kept: dict[int, Columns] = {}  # by those that have died

    def sent(self, key: int) -> None:
        """The request goes to a generator, which has delivered nothing yet."""
        self._delivered.pop(key, None)

    def deliver(self, key: int, start: int, columns: Columns) -> int:
        """Tokens from `start` on (0: the response was begun again); how many there are now.

        Raises ProtocolError for columns of different lengths, and for tokens that do not follow those before.
        """
        lengths = {columns[name].shape if name in columns else () for name in _ALWAYS}
        before = self._delivered.get(key) if start else None
        if len(lengths) > 1 or (start and (before is None or before["token_ids"].size != start)):
            raise ProtocolError(f"tokens of request {key} from {start} on, of lengths {lengths}, do not follow")
        self._delivered[key] = _joined(before, columns)
        return int(self._delivered[key]["token_ids"].size)

    def kept(self, key: int) -> int:
        """Tokens that dead generators delivered: the response of the one that runs it now begins behind them."""
        kept = self._kept.get(key)
        return 0 if kept is None else int(kept["token_ids"].size)

    def go_on(self, request: Generate, tokens: int) -> Generate:
        """The request without the first `tokens` tokens of its response, which were delivered.

        Its gate is the newest version among them: versions never go backwards inside a response. Its seed changes, or
        the same random numbers would be drawn again.
        """
        key = request.request_id
        columns = {name: values[:tokens] for name, values in self._delivered.pop(key).items()}
        self._kept[key] = _joined(self._kept.get(key), columns)
        newest = Version(request.version.timeline, int(columns["policy_version"].max()))
        return replace(
            request,
            version=max(request.version, newest),
            prompt_ids=np.concatenate([request.prompt_ids, columns["token_ids"].astype(np.int32)]),
            max_tokens=request.max_tokens - tokens,
            seed=None if request.seed is None else request.seed + tokens,
        )

    def rename(self, key: int, new_key: int) -> None:
        for parts in (self._delivered, self._kept):
            if key in parts:
                parts[new_key] = parts.pop(key)

    def answer(self, key: int, columns: Columns, context: Columns) -> tuple[Columns, Columns, int]:
        """Columns and context of the whole response, whose end is given, and how many tokens were put before it.

        Who went on has read those tokens at the end of its prompt: their context columns are its own.
        """
        self._delivered.pop(key, None)
        kept = self._kept.pop(key, None)
        if kept is None:
            return columns, context, 0
        tokens = int(kept["token_ids"].size)
        read = {name: values[-tokens:] for name, values in context.items()}
        before = {name: values[:-tokens] for name, values in context.items()}
        return _joined(kept | read, columns), before, tokens


def _joined(before: Columns | None, columns: Columns) -> Columns:
    """Per-token columns one after the other; what the first part lacks is masked there. Other columns are the last."""
    if before is None:
        return columns
    tokens = before["token_ids"].size
    joined = {}
    for name, values in columns.items():
        column = declared(name)
        if column.scope == "token":
            values = np.concatenate([before.get(name, column.full(tokens)), values])
        joined[name] = values
    return joined

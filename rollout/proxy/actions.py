"""What the proxy's core asks its shell to do."""

from __future__ import annotations

from collections.abc import Hashable

from msgspec import Struct

from rl.wire.messages import ReportsLost, StillSampling, Usage

Client = Hashable


class SendTo(Struct, frozen=True):
    """Send the request `key` to a generator; it answers under this key."""

    generator: int
    key: int


class AbortAt(Struct, frozen=True):
    generator: int
    key: int


class Reply(Struct, frozen=True):
    """Answer the client. With `forward` it is the generator's answer at hand, else an empty one. `key` is over."""

    client: Client
    request_id: int
    key: int
    forward: bool
    finish_reason: str
    error: str = ""
    queued_s: float = 0.0  # spent waiting in the proxy


class Forget(Struct, frozen=True):
    """`key` is over and nobody waits for its answer."""

    key: int


class GoOn(Struct, frozen=True):
    """`tokens` of the request `key` were delivered before its generator died: it is sent again without them."""

    key: int
    tokens: int


class ReportFirstToken(Struct, frozen=True):
    """The first token of a training session's first turn; again if that turn was sent again."""

    key: int
    session: int


class Rename(Struct, frozen=True):
    """The request `key` is sent again under another key: a late answer to the old one is nobody's."""

    key: int
    new_key: int


Action = SendTo | AbortAt | Reply | Forget | GoOn | Rename | ReportFirstToken | Usage | ReportsLost | StillSampling
"""The last three are told to the broker as they are."""

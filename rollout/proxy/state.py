"""What the proxy knows (requests, generators, cached prefixes) and what it asks its shell to do (actions)."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from msgspec import Struct

from rl.core.recent import Recent
from rollout.proxy.balance import Line

Client = Hashable
REMEMBERED_PROMPTS = 4096  # per generator


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
    session: int
    forward: bool
    finish_reason: str
    error: str = ""
    queued_s: float = 0.0  # spent waiting in the proxy


class Forget(Struct, frozen=True):
    """`key` is over and nobody waits for its answer."""

    key: int


class ReportFirstToken(Struct, frozen=True):
    """First token of a training session's first turn; again if that turn was sent again."""

    key: int
    session: int


class ReportUsage(Struct, frozen=True):
    """Tokens sampled for a training session; `lost` by a generator that died."""

    session: int
    tokens: int
    lost: bool


Action = SendTo | AbortAt | Reply | Forget | ReportFirstToken | ReportUsage


@dataclass(slots=True, eq=False)
class Request:
    key: int
    client: Client
    request_id: int
    session: int
    train: bool
    prompt_len: int
    max_tokens: int
    priority: int
    prompt_hash: int | None
    since: float  # start of the current wait
    need: int  # KV tokens reserved
    queued: bool = False
    generator: Generator | None = None
    work: int = 0  # its share of the generator's load
    expected: int = 0  # response tokens expected when it was sent
    tokens: int = 0  # sampled by the current generator, as last reported
    aborted: bool = False
    orphan: bool = False  # its client is dead
    deaths: int = 0
    overtaken: int = 0
    queued_s: float = 0.0


@dataclass(slots=True, eq=False)
class Generator:
    index: int
    incarnation: int
    kv_tokens: int
    max_num_seqs: int
    alive: bool = True
    load: int = 0
    reserved: int = 0
    live: dict[int, Request] = field(default_factory=dict)
    loyal: Line[Request] = field(default_factory=Line)  # queued requests whose prefix is cached here
    version: Hashable = None
    cache_epoch: int = 0  # counts what emptied the prefix cache
    prompts: Recent[None] = field(default_factory=lambda: Recent(REMEMBERED_PROMPTS))  # hashes of those cached here

    def has_room(self, need: int) -> bool:
        return self.alive and len(self.live) < self.max_num_seqs and self.reserved + need <= self.kv_tokens


class Home(Struct, frozen=True):
    """Where the last turn of a session ran, and how many tokens of its context are cached there."""

    generator: Generator
    cache_epoch: int
    tokens: int

"""What the proxy knows of requests and generators."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from rl.core.recent import Recent
from rollout.proxy.actions import Client
from rollout.proxy.balance import PriorityQueue

REMEMBERED_PROMPTS = 4096  # per generator


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request that has not been answered: in the queue, or on a generator."""

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
    generator: GeneratorState | None = None
    work: int = 0  # its share of the generator's load
    expected: int = 0  # response tokens expected when it was sent
    tokens: int = 0  # sampled by the current generator, as last reported
    aborted: bool = False
    orphan: bool = False  # its client is dead
    deaths: int = 0
    overtaken: int = 0
    queued_s: float = 0.0

    def has_sampled(self, tokens: int) -> None:
        """Prefill is done; a response longer than expected counts as nearly finished."""
        assert self.generator is not None
        self.tokens = tokens
        work = max(1, self.expected - tokens)
        self.generator.load += work - self.work
        self.work = work


@dataclass(slots=True, eq=False)
class GeneratorState:
    """One incarnation of a generator."""

    index: int
    incarnation: int
    kv_tokens: int
    max_num_seqs: int
    alive: bool = True
    load: int = 0
    reserved: int = 0
    live: dict[int, RoutedRequest] = field(default_factory=dict)
    cached_here: PriorityQueue[RoutedRequest] = field(default_factory=PriorityQueue)
    """Queued requests of sessions whose context is cached here."""
    version: Hashable = None
    cache_epoch: int = 0  # counts what emptied the prefix cache
    prompts: Recent[None] = field(default_factory=lambda: Recent(REMEMBERED_PROMPTS))  # hashes of those cached here

    @property
    def room(self) -> int:
        """Free KV tokens; negative if it takes no request at all."""
        full = not self.alive or len(self.live) >= self.max_num_seqs
        return -1 if full else self.kv_tokens - self.reserved

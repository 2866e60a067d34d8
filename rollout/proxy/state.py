"""What the proxy knows of requests and generators."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from rl.store.recent import Recent
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
    need: int  # KV tokens reserved, or to be reserved when it is sent
    queued: bool = False
    generator: GeneratorState | None = None
    work: int = 0  # its share of the generator's load
    expected: int = 0  # response tokens expected when it was sent
    tokens: int = 0  # sampled by the current generator, as last reported
    delivered: int = 0  # of these, the first ones, which the proxy has
    kept: int = 0  # delivered by generators that died: now the end of its prompt
    aborted: bool = False
    orphan: bool = False  # its client is dead
    deaths: int = 0
    overtaken: int = 0
    queued_s: float = 0.0

    @property
    def whole(self) -> int:
        """KV tokens of the longest response that it may get."""
        return self.prompt_len + self.max_tokens

    def leave_generator(self) -> tuple[int, int]:
        """Note that its generator died or lost this request; returns how many tokens are kept (the end of its prompt
        from now on) and lost."""
        kept = min(self.delivered, self.max_tokens - 1)  # one is left to sample
        lost = max(0, self.tokens - kept)
        self.kept += kept
        self.prompt_len += kept
        self.max_tokens -= kept
        if kept:
            self.prompt_hash = None

        self.generator = None
        self.tokens = self.delivered = 0
        return kept, lost

    def has_sampled(self, tokens: int) -> None:
        """Prefill is done; a response longer than expected counts as nearly finished."""
        assert self.generator is not None
        self.tokens = tokens

        # What has outgrown its reservation is expected to go on for a quarter of its length.
        if self.prompt_len + tokens > self.need:
            need = self.prompt_len + min(self.max_tokens, tokens + tokens // 4)
            self.generator.reserved += need - self.need
            self.need = need

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
    cache_timeline: int = 0  # counts what emptied the prefix cache
    prompts: Recent[None] = field(default_factory=lambda: Recent(REMEMBERED_PROMPTS))  # hashes of those cached here

    def release(self, request: RoutedRequest) -> None:
        """Note that a request does not run here any more."""
        del self.live[request.key]
        self.reserved -= request.need
        self.load -= request.work

    @property
    def room(self) -> int:
        """Free KV tokens; negative if it takes no request at all."""
        full = not self.alive or len(self.live) >= self.max_num_seqs
        return -1 if full else self.kv_tokens - self.reserved

    def takes(self, request: RoutedRequest) -> bool:
        """Whether there is room for what it reserves, and all of its memory would do for the longest response."""
        return self.room >= request.need and self.kv_tokens >= request.whole


class Limits:
    """What the generators can take at most, in tokens."""

    def __init__(self) -> None:
        self.largest_up = 0
        """KV cache of the largest generator that is up."""
        self._kv_tokens: dict[int, int] = {}  # of each generator's last incarnation, dead ones included
        self._max_model_len = 0

    def up(self, index: int, kv_tokens: int, max_model_len: int) -> None:
        self._kv_tokens[index] = kv_tokens
        self._max_model_len = max_model_len  # one configuration: equal for all
        self.largest_up = max(self.largest_up, kv_tokens)

    def down(self, left: Iterable[GeneratorState]) -> None:
        self.largest_up = max((each.kv_tokens for each in left), default=0)

    def refuse(self, request: RoutedRequest) -> str:
        """Why no generator will ever take the request, or nothing."""
        if request.prompt_len < 1 or request.max_tokens < 1:
            return f"empty request: prompt of {request.prompt_len} tokens, max_tokens={request.max_tokens}"
        if not self._kv_tokens:  # no generator has said its limits yet
            return ""

        limits = {"generator.max_model_len": self._max_model_len, "KV cache": max(self._kv_tokens.values())}
        for name, limit in limits.items():
            if request.whole > limit:
                asked = f"prompt of {request.prompt_len} tokens + max_tokens={request.max_tokens}"
                return f"{asked} exceeds the {name} of {limit} tokens"
        return ""

"""What the proxy knows of requests and generators: their limits, cached prefixes, and the memory that is reserved."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from rl.store.recent import Recent
from rollout.proxy.actions import Client
from rollout.proxy.balance import PriorityQueue

KvAdmission = Literal["expected", "whole"]
_WEIGHT = 0.02  # of one response in the mean
REMEMBERED_PROMPTS = 4096  # per generator
_REMEMBERED = 65_536  # sessions and prompts, each, of which it is known in which cache they stand


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


class CachedPrefix(Struct, frozen=True):
    """Where the last turn of a session ran, and how many tokens of its context are cached there."""

    generator: GeneratorState
    cache_timeline: int
    tokens: int


class PrefixIndex:
    """Which generator has which prefix in its cache: hints, of the sessions and prompts that came last."""

    def __init__(self) -> None:
        self._sessions: Recent[CachedPrefix] = Recent(_REMEMBERED)
        self._prompts: Recent[GeneratorState] = Recent(_REMEMBERED)  # where a prompt was sent last

    def knows_session(self, session: int) -> bool:
        return session in self._sessions

    def of_session(self, request: RoutedRequest) -> GeneratorState | None:
        """Where the session's last turn ran."""
        prefix = self._sessions.get(request.session)
        return prefix.generator if prefix is not None else None

    def of_prompt(self, request: RoutedRequest) -> GeneratorState | None:
        """Where the same prompt was sent last."""
        return self._prompts.get(request.prompt_hash) if request.prompt_hash is not None else None

    def cached_tokens(self, request: RoutedRequest, generator: GeneratorState) -> int:
        """Prompt tokens that this generator need not prefill."""
        if request.prompt_hash in generator.prompts:
            return request.prompt_len
        prefix = self._sessions.get(request.session)
        if prefix is None or prefix.generator is not generator or prefix.cache_timeline != generator.cache_timeline:
            return 0
        return min(prefix.tokens, request.prompt_len)

    def sent(self, request: RoutedRequest, generator: GeneratorState) -> None:
        if request.prompt_hash is not None:
            self._prompts.use(request.prompt_hash, generator)
            generator.prompts.use(request.prompt_hash, None)

    def finished(self, request: RoutedRequest, generator: GeneratorState, context: int) -> None:
        """A turn that ended with `context` tokens in the generator's cache."""
        self._sessions.use(request.session, CachedPrefix(generator, generator.cache_timeline, context))


class Admission:
    """How much KV memory a request reserves.

    `whole`: prompt and max_tokens. `expected`: prompt and the mean response, and more as it grows.

    With `expected` the responses of one engine may outgrow its memory together. It then pre-empts the newest and
    computes it again, and the oldest goes on: since every request fits alone, each comes to its end.
    """

    def __init__(self, kind: KvAdmission) -> None:
        self.kind = kind
        self.mean_response = 0.0
        """Tokens; 0: none has ended yet."""

    def ended(self, tokens: int) -> None:
        """A response came to its own end."""
        old = self.mean_response
        self.mean_response = old + _WEIGHT * (tokens - old) if old else float(tokens)

    def expected(self, request: RoutedRequest) -> int:
        """Response tokens; as many as it may have while nothing is known."""
        mean = round(self.mean_response)
        return max(1, min(request.max_tokens, mean)) if mean else request.max_tokens

    def reserve(self, request: RoutedRequest) -> None:
        """Say what it would reserve if it were sent now."""
        request.need = request.whole if self.kind == "whole" else request.prompt_len + self.expected(request)

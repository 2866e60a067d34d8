"""Which generator has which prefix in its cache: hints, so the oldest ones may be forgotten."""

from __future__ import annotations

from msgspec import Struct

from rl.store.recent import Recent
from rollout.proxy.state import GeneratorState, RoutedRequest


class CachedPrefix(Struct, frozen=True):
    """Where the last turn of a session ran, and how many tokens of its context are cached there."""

    generator: GeneratorState
    cache_timeline: int
    tokens: int


class PrefixIndex:
    """`remembered` sessions, and as many prompts."""

    def __init__(self, remembered: int) -> None:
        self._sessions: Recent[CachedPrefix] = Recent(remembered)
        self._prompts: Recent[GeneratorState] = Recent(remembered)  # where a prompt was sent last

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

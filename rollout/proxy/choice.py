"""Which generator takes a request: the cheapest one that has room (`core.py` says what it costs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl.config.hooks import make_hooks
from rl.config.section import Named
from rollout.proxy.balance import LoadTree
from rollout.proxy.hooks import ProxyHook
from rollout.proxy.state import Admission, GeneratorState, PrefixIndex, RoutedRequest


class Choice:
    """Reads what the core keeps up to date. `hooks`, `max_overtakes`: the core's."""

    def __init__(
        self,
        generators: Mapping[int, GeneratorState],
        tree: LoadTree,
        prefixes: PrefixIndex,
        admission: Admission,
        hooks: Sequence[Named],
        max_overtakes: int,
    ) -> None:
        self._generators = generators
        self._tree = tree
        self._prefixes = prefixes
        self._admission = admission
        self._hooks: list[ProxyHook] = make_hooks("proxy", hooks, generators, prefixes)
        self._max_overtakes = max_overtakes

    def of(self, request: RoutedRequest) -> GeneratorState | None:
        """The least loaded generator, or one that holds a prefix of the prompt; None if there is no room."""
        self._admission.reserve(request)
        for hook in self._hooks:
            if (placed := hook.place(request)) is not None:
                return placed

        index = self._tree.best(request.need)
        if index is not None and not self._generators[index].takes(request):  # alone it would not fit
            index = self._tree.best(request.whole)
        if index is None:
            return None

        prefixes = self._prefixes
        chosen = self._generators[index]
        cost = chosen.load - prefixes.cached_tokens(request, chosen)
        for generator in (prefixes.of_prompt(request), prefixes.of_session(request)):
            if generator is not None and generator is not chosen and generator.takes(request):
                its_cost = generator.load - prefixes.cached_tokens(request, generator)
                if its_cost <= cost:
                    chosen = generator
                    cost = its_cost
        return chosen

    def overtaker(self, freed: GeneratorState, head: RoutedRequest) -> RoutedRequest | None:
        """A waiting request that saves more prefill on the freed generator than the head of the queue."""
        request = freed.cached_here.head()
        if request is None or request is head or head.overtaken >= self._max_overtakes:
            return None

        self._admission.reserve(request)
        saves_more = self._prefixes.cached_tokens(request, freed) > self._prefixes.cached_tokens(head, freed)
        return request if saves_more and freed.takes(request) else None

"""What a hook of the proxy is: it may say which generator takes a request, before the costs are compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rl.config.hooks import Hook, Role
from rollout.proxy.state import GeneratorState, PrefixIndex, RoutedRequest


class ProxyHook(Hook):
    """A hook reads the proxy's parts and changes none."""

    role: ClassVar[Role] = "proxy"

    def __init__(self, options: Any, generators: Mapping[int, GeneratorState], prefixes: PrefixIndex) -> None:
        """generators: those that are up, by index; prefixes: where the beginnings of prompts are cached."""
        self.options = options
        self.generators = generators
        self.prefixes = prefixes

    def place(self, request: RoutedRequest) -> GeneratorState | None:
        """The generator that takes this request now, whatever room it has; None: the proxy chooses."""
        return None


class PinPrompts(ProxyHook):
    """No prompt replication, a baseline: all responses of a prompt run on the generator of its first one.

    They wait in its engine, whatever is free elsewhere, and may exceed its KV capacity.
    """

    def place(self, request: RoutedRequest) -> GeneratorState | None:
        same_prompt = self.prefixes.of_prompt(request)
        return same_prompt if same_prompt is not None and same_prompt.alive else None

"""How much KV memory a request reserves: what it may need at most, or what is expected of it."""

from __future__ import annotations

from typing import Literal

from rollout.proxy.state import RoutedRequest

KvAdmission = Literal["expected", "whole"]
_WEIGHT = 0.02  # of one response in the mean


class Admission:
    """`whole`: prompt and max_tokens. `expected`: prompt and the mean response, and more as it grows.

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

"""What no environment server would ask is refused before a generator sees it: it could end one engine after another."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from rl.wire.messages import Generate, ProtocolError, Version
from rollout.proxy.requests import check_request
from tests.any_message import any_message

FINE = Generate(1, 2, "train", Version(0, 3), np.arange(4, dtype=np.int32), 8, 1.0, 1.0, [0], seed=5)


def test_what_is_asked_in_a_run_is_let_pass() -> None:
    for request in (FINE, replace(FINE, known=4, temperature=0.0, seed=None), replace(FINE, seed=2**63 - 1)):
        check_request(request, 4)
    check_request(replace(FINE, prompt_ids=np.zeros(0, np.int32)), 4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"prompt_ids": np.array([1, -5], np.int32)}, "the prompt id -5: the vocabulary has 4 ids"),
        ({"prompt_ids": np.array([1, 4], np.int32)}, "the prompt id 4"),
        ({"prompt_ids": np.zeros((2, 2), np.int32)}, "prompt ids"),
        ({"known": -1}, "-1 of them known"),
        ({"known": 5}, "5 of them known"),
        ({"max_tokens": 0}, "at most 0 tokens"),
        ({"max_tokens": 2**62}, "tokens"),
        ({"temperature": math.nan}, "temperature nan"),
        ({"temperature": -1.0}, "temperature -1"),
        ({"top_p": math.nan}, "top_p nan"),
        ({"top_p": 0.0}, "top_p 0"),
        ({"seed": -1}, "seed -1"),
        ({"seed": 2**63}, "seed"),
        ({"priority": 2**63}, "priority"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_what_could_end_an_engine_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        check_request(replace(FINE, **change), 4)


def test_whatever_is_asked_is_judged() -> None:
    pick = random.Random(3)
    for _ in range(2000):
        request = any_message(Generate, pick)
        assert isinstance(request, Generate)
        try:
            check_request(request, 4)
        except ProtocolError:
            continue
        assert request.prompt_ids.ndim == 1 and 0 <= request.temperature < math.inf and request.max_tokens >= 1

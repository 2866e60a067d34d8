"""Rows and a reward of one's own, for `experiments/own_reward_cpu.yaml`: write a row of digits backwards."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

ROWS = 2000


def rows() -> Iterator[dict[str, Any]]:
    """Each has a prompt and an answer. No two are the same, and their order always is."""
    draw = random.Random(0)
    seen: set[str] = set()
    while len(seen) < ROWS:
        digits = [str(draw.randrange(10)) for _ in range(draw.randint(4, 6))]
        prompt = f"Backwards: {' '.join(digits)}"
        if prompt not in seen:
            seen.add(prompt)
            yield {"prompt": prompt, "answer": " ".join(reversed(digits))}


def places(response: str, row: dict[str, Any]) -> float:
    """The share of places that hold the right digit; nothing for an answer of another length."""
    said = response.split()
    wanted: list[str] = row["answer"].split()
    if len(said) != len(wanted):
        return 0.0
    return sum(a == b for a, b in zip(said, wanted, strict=True)) / len(wanted)

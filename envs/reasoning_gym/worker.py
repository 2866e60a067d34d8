"""A reasoning-gym worker: entries are made, and answers scored, by code that may take long or never end."""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import lru_cache
from typing import Any

from envs.reasoning_gym.requests import PuzzleReply, PuzzleRequest
from envs.workers.serving import begin_worker, serve

KEPT_ENTRIES = 4096


def main(descriptor: int, name: str, config: dict[str, Any], size: int) -> None:
    replies = begin_worker()
    warnings.simplefilter("ignore")  # of parsers that meet what a model wrote
    import reasoning_gym

    @lru_cache(maxsize=2)
    def data_set(seed: int) -> Any:
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **config)

    @lru_cache(maxsize=KEPT_ENTRIES)
    def entry(seed: int, index: int) -> dict[str, Any]:
        made: dict[str, Any] = data_set(seed)[index]
        return made

    def answer(_: int, request: PuzzleRequest | None) -> PuzzleReply:
        assert request is not None  # no state is kept of a session
        found = entry(request.seed, request.index)
        gold = found["answer"]
        score = 0.0
        error = ""
        if request.answer is not None:
            try:
                score = min(1.0, max(0.0, float(data_set(request.seed).score_answer(request.answer, found))))
            except Exception as raised:
                error = f"{name}.score_answer raised {type(raised).__name__}: {raised}"
        return PuzzleReply(found["question"], gold if isinstance(gold, str) else "", score, error)

    serve(replies, descriptor, PuzzleRequest, answer)


if __name__ == "__main__":
    os.environ.setdefault("MPLBACKEND", "agg")
    main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4]))

"""A reward worker: runs reward functions of a user's own, one response after another."""

from __future__ import annotations

import json
import sys

from envs.dataset.requests import ScoreReply, ScoreRequest
from envs.dataset.rewards import load_reward, score
from envs.workers.serving import begin_worker, serve, told


def main(descriptor: int, names: list[str]) -> None:
    replies = begin_worker()
    functions = {name: load_reward(name) for name in names}

    def answer(_: int, request: ScoreRequest | None) -> ScoreReply:
        assert request is not None  # no state is kept of a session
        row = json.loads(request.row)
        values: list[float | None] = []
        error = ""

        for name, function in functions.items():
            try:
                values.append(score(function, request.response, row))
            except Exception as raised:
                values.append(None)
                error = error or f"{name} raised {told(raised)}"
        return ScoreReply(values, error)

    serve(replies, descriptor, ScoreRequest, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])

"""A process of the run in which something is wrong (`python -m experiments.pathologies.spoilt`, FRESCO_SPOILT=NAME)."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

_DELAY_S = 1.0
_LIFE_S = 4.0


def slow_server() -> None:
    from envs import server, synthetic

    draw = synthetic.SyntheticFamily.draw_latency_s

    def slow(self: Any, chance: random.Random) -> float:
        return _DELAY_S + draw(self, chance)

    synthetic.SyntheticFamily.draw_latency_s = slow  # type: ignore[method-assign]
    server.main()


def dead_generator() -> None:
    """A generator, but not that of the first evaluation, dies whenever it has lived for a while."""

    def die() -> None:
        time.sleep(_LIFE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die, daemon=True).start()
    generator()


def undelivered() -> None:
    generator()


def generator() -> None:
    from rollout.generator import process

    process.main()


def throw_weights_away() -> None:
    """Every load but the first is read to its end; the engine believes that it has loaded."""
    from rollout.generator.engines import vllm_worker

    load_all = vllm_worker.load_all
    loads: list[int] = []

    def first_only(model_runner: Any, pairs: Iterable[Any]) -> None:
        loads.append(1)
        if len(loads) == 1:
            load_all(model_runner, pairs)
        else:
            for _ in pairs:
                pass

    vllm_worker.load_all = first_only


SPOILT: dict[str, Callable[[], None]] = {each.__name__: each for each in (slow_server, dead_generator, undelivered)}

if os.environ.get("FRESCO_SPOILT") == undelivered.__name__:
    throw_weights_away()  # also where the engine's own process imports this module again

if __name__ == "__main__":
    sys.exit(SPOILT[os.environ["FRESCO_SPOILT"]]())

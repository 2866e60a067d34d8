"""A user's module: columns that say which ids an engine had read at each token, and an engine that fills them.

An entry is a function of all ids before its token, as the routing of the position that predicted it would be. So an
entry at the wrong token, or of another history, has another value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rl.wire.columns import Column
from rl.wire.messages import Generate, Generated, TokenSequence
from rollout.generator.engines import ENGINES
from rollout.generator.engines.base import Sampled
from rollout.generator.engines.simulated import SimulatedEngine

READ = Column("read", "uint16", shape=(48,), covers="context", reads="forward")
SAMPLER = Column("sampler", "int32", masked=-1, shape=(2,))  # likewise of sampled tokens, and who has sampled them
ENGINES["simulated"] = f"{__name__}:ReadingEngine"

_MODULUS = 65521
_SPREAD = np.arange(1, 49)


def histories(ids: Sequence[int] | np.ndarray) -> list[int]:
    """Of each token, and of the one after the last, a number that stands for the ids before it."""
    found = [1]
    for each in ids:
        found.append((31 * found[-1] + int(each) + 7) % _MODULUS)
    return found


def read_entries(ids: Sequence[int] | np.ndarray, start: int = 0) -> np.ndarray:
    """(T - start, 48) of READ."""
    numbers = np.array(histories(ids)[start : len(ids)], np.int64).reshape(-1, 1)
    return (numbers * _SPREAD % _MODULUS + 1).astype(np.uint16)


def sampler_entries(ids: Sequence[int] | np.ndarray, start: int, sampler: int) -> np.ndarray:
    """(T - start, 2) of SAMPLER."""
    numbers = histories(ids)[start : len(ids)]
    return np.array([[number, sampler] for number in numbers], np.int32).reshape(-1, 2)


def fill(request: Generate, sampled: Sampled, sampler: int, *, ended: bool) -> None:
    """What an engine answers beside the ids: of the prompt it tells at the end, as a real one does."""
    prompt = request.prompt_ids.tolist()
    ids = prompt + sampled.token_ids
    sampled.columns = {"sampler": sampler_entries(ids, len(prompt), sampler)}
    if ended:
        sampled.columns["read"] = read_entries(ids, len(prompt))
        sampled.context = {"read": read_entries(prompt, request.known)}


def answer(request: Generate, sampled: Sampled) -> Generated:
    return Generated(
        request_id=request.request_id,
        session=request.session,
        columns=sampled.arrays(),
        context=sampled.context_arrays(),
        timeline=0,
        finish_reason=sampled.finish_reason,
        tokens_generated=sampled.tokens_generated,
        generator=0,
    )


def check(sequence: TokenSequence) -> None:
    """Every entry of every token."""
    ids = sequence.token_ids
    np.testing.assert_array_equal(sequence.columns["read"], read_entries(ids))
    sampled = sequence.loss_mask != 0
    numbers = np.array(histories(ids)[:-1])
    np.testing.assert_array_equal(sequence.columns["sampler"][sampled, 0], numbers[sampled])
    assert (sequence.columns["sampler"][~sampled] == -1).all()


class ReadingEngine(SimulatedEngine):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._further = []  # nothing is left to masked values

    async def generate(self, request: Generate, progress: Callable[[Sampled], None]) -> Sampled:
        me = 1000 * self._context.index + self._context.incarnation

        def told(sampled: Sampled) -> None:
            fill(request, sampled, me, ended=False)
            progress(sampled)

        sampled = await super().generate(request, told)
        fill(request, sampled, me, ended=True)
        return sampled

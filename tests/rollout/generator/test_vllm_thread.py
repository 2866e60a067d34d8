"""vLLM's core in a thread of its generator: it computes with the threads that are asked for, what fails there ends
everything that waits for it and says why, and what hangs there does not hold up the end.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import torch

from rl.config.failures import EngineDied
from rl.wire.messages import Version
from tests.rollout.generator.vllm_rig import PROBE, TOLERANCE, Rig


@pytest.mark.parametrize("threads", [1, 2])
def test_a_step_has_the_threads_that_are_asked_for(threads: int) -> None:
    """Whatever this process began with: OpenMP counts for each thread, and vLLM fails where two counts meet."""
    before = torch.get_num_threads()
    torch.set_num_threads(3 - threads)
    rig = Rig(tied=False, own_process=False, threads=threads)
    rig.start()
    core: Any = rig.engine._core
    assert rig.call(core._call(torch.get_num_threads)) == threads

    request = rig.request(PROBE)
    (result,) = rig.generate(request)
    assert rig.error(request, result) < TOLERANCE
    rig.stop()
    torch.set_num_threads(before)


def test_a_load_that_hangs_does_not_hold_up_the_end() -> None:
    rig = Rig(tied=False, own_process=False)
    rig.start()
    hold = rig.folder / "hold"
    hold.touch()
    rig.publish(1)

    async def end() -> float:
        load = asyncio.create_task(rig.engine.load(Version(0, 1), PROBE))
        while rig.engine._open:
            await asyncio.sleep(0.01)
        load.cancel()
        began = time.monotonic()
        await rig.engine.stop()
        return time.monotonic() - began

    assert rig.call(end()) < 60  # its two deadlines are of two seconds
    hold.unlink()
    core: Any = rig.engine._core
    core._thread.join(60)
    rig.stop()


def test_a_step_that_fails_ends_what_runs_and_says_why() -> None:
    rig = Rig(tied=False, own_process=False)
    rig.start()
    core: Any = rig.engine._core

    def fail() -> None:
        raise MemoryError("no room for this step")

    core._engine.step = fail
    request = rig.request(PROBE)
    for call in (rig.engine.generate(request, lambda _: None), rig.engine.watch(), rig.next()):
        with pytest.raises(EngineDied, match="failed with MemoryError: no room for this step") as died:
            rig.call(call)
        assert isinstance(died.value.__cause__, MemoryError)
    rig.stop()

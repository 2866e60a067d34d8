"""vLLM's core in a thread of its generator: what fails there ends everything that waits for it, and says why."""

from __future__ import annotations

from typing import Any

import pytest

from tests.rollout.generator.vllm_rig import PROBE, Rig


def test_a_step_that_fails_ends_what_runs_and_says_why() -> None:
    rig = Rig(tied=False, own_process=False)
    rig.start()
    core: Any = rig.engine._core

    def fail() -> None:
        raise MemoryError("no room for this step")

    core._engine.step = fail
    with pytest.raises(MemoryError, match="no room for this step"):
        rig.generate(rig.request(PROBE))
    with pytest.raises(MemoryError, match="no room for this step"):
        rig.call(rig.engine.watch())
    with pytest.raises(Exception, match="EngineCore encountered an issue") as dead:  # vLLM's own words
        rig.update()
    rig.stop()
    assert isinstance(dead.value.__cause__, MemoryError)

"""A generator whose first engine blocks, as a real one can: at its start, after some work, or at its end."""

from __future__ import annotations

import os
import time

from rollout.generator.engines import ENGINES
from rollout.generator.engines.base import EngineInfo
from rollout.generator.engines.simulated import SimulatedEngine
from rollout.generator.process import main

WORKS_S = 9.0
BLOCKS_AT = "FRESCO_TEST_BLOCKS_AT"


class HangingEngine(SimulatedEngine):
    def blocks_at(self, moment: str) -> bool:
        return self._context.incarnation == 0 and os.environ.get(BLOCKS_AT, "start") == moment

    async def watch(self) -> None:
        if self.blocks_at("end"):
            raise ValueError("the engine has failed")
        await super().watch()

    async def stop(self) -> None:
        if self.blocks_at("end"):
            time.sleep(3600)
        await super().stop()

    async def start(self) -> EngineInfo:
        if self.blocks_at("start"):
            until = time.monotonic() + WORKS_S
            while time.monotonic() < until:
                pass
            time.sleep(3600)
        return await super().start()


if __name__ == "__main__":
    ENGINES["simulated"] = "tests.launch.hanging_engine:HangingEngine"
    main()

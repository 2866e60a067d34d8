"""A generator's own process, whose first engine works for a while as it starts and then blocks, as a real one can."""

from __future__ import annotations

import time

from rollout.generator.engines import ENGINES
from rollout.generator.engines.base import EngineInfo
from rollout.generator.engines.simulated import SimulatedEngine
from rollout.generator.process import main

WORKS_S = 9.0


class HangingEngine(SimulatedEngine):
    async def start(self) -> EngineInfo:
        if self._context.incarnation == 0:
            until = time.monotonic() + WORKS_S
            while time.monotonic() < until:
                pass
            time.sleep(3600)
        return await super().start()


if __name__ == "__main__":
    ENGINES["simulated"] = "tests.launch.hanging_engine:HangingEngine"
    main()

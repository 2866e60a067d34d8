"""A game whose step blocks its process until a file is there: `gymnasium.make("tests.envs.blocking_game:Gate-v0")`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete


class Gate(gymnasium.Env[Any, Any]):
    observation_space = Discrete(2)
    action_space = Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        gate = Path(os.environ["GATE"])
        gate.with_suffix(".asked").touch()
        while not gate.exists():
            time.sleep(0.01)  # the request's own deadline ends a wait in vain
        return 1, 1.0, True, False, {}


gymnasium.register("Gate-v0", entry_point="tests.envs.blocking_game:Gate")

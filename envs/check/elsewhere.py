"""The openings of tasks in another process, whose hashes of texts are others: `python -m envs.check.elsewhere`.

Reads {"config", "indices"} as JSON from stdin and prints the openings as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from envs.check.agents import nothing
from envs.check.player import Player
from envs.registry import make_family
from rl.config.schema import Config
from rl.wire.process import die_with_parent

DEADLINE_S = 300.0


def openings_elsewhere(config: Config, indices: Sequence[int]) -> list[str]:
    """Raises RuntimeError where the other process fails."""
    asked = json.dumps({"config": config.model_dump(mode="json"), "indices": list(indices)})

    environment = os.environ | {"PYTHONHASHSEED": "12345", "FRESCO_PARENT_PID": str(os.getpid())}
    child = subprocess.run(
        [sys.executable, "-m", "envs.check.elsewhere"],
        input=asked,
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
    )

    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no word"])[-1]
        raise RuntimeError(f"another process could not open the tasks: {last}")
    openings: list[str] = json.loads(child.stdout.splitlines()[-1])
    return openings


async def _openings(config: Config, indices: Sequence[int]) -> list[str]:
    family = make_family(config)
    await family.start()
    try:
        outcomes = await Player(family, config).play_all(indices, nothing)
        return [outcome.opening or outcome.error for outcome in outcomes]
    finally:
        await family.stop()


if __name__ == "__main__":
    die_with_parent()
    request = json.loads(sys.stdin.read())
    print(json.dumps(asyncio.run(_openings(Config.model_validate(request["config"]), request["indices"]))))

"""One check of one environment: start it, play, stop it, and say what was found."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from envs.check.checks import CHECKS, Lab, Scope
from envs.check.difficulty import Model, difficulty
from envs.check.findings import Page
from envs.check.player import Player
from envs.check.watch import LoopWatch
from envs.registry import make_family
from rl.config.schema import Config

STOP_S = 30.0


def check_environment(config: Config, scope: Scope, model: Model | None = None) -> Page:
    """Raises ConfigError for options that cannot be used, and what the environment raises at its start."""
    begin = time.monotonic()
    with _own_temporary_folder() as temporary:
        page = asyncio.run(_check(config, scope, model, temporary))
    page.seconds = time.monotonic() - begin
    return page


async def _check(config: Config, scope: Scope, model: Model | None, temporary: Path) -> Page:
    family = make_family(config)
    tasks = {split: family.task_count(split) for split in ("train", "eval")}
    page = Page(config.env.name, tasks)
    player = Player(family, config)

    try:
        await asyncio.wait_for(family.start(), config.timeouts.start_s)
        with LoopWatch(config.env.step_deadline_s) as watch:
            lab = Lab(player, scope, page, watch, temporary)
            async with asyncio.timeout(scope.deadline_s):
                for check in CHECKS:
                    await check(lab)
        if model is not None:
            page.histogram = await difficulty(player, lab.spread("eval", scope.openings), model)
    except TimeoutError:
        page.add("in time", f"the environment was not checked within {scope.deadline_s:g} s", "")

    finally:
        await asyncio.wait_for(family.stop(), STOP_S)
    return page


@contextmanager
def _own_temporary_folder() -> Iterator[Path]:
    """Temporary files of the environment and its workers in one place, where they can be counted, and removed after."""
    before = os.environ.get("TMPDIR")
    with tempfile.TemporaryDirectory(prefix="fresco-check-") as folder:
        os.chmod(folder, 0o755)  # a sandbox's own user passes through
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        try:
            yield Path(folder)
        finally:
            tempfile.tempdir = None
            del os.environ["TMPDIR"]
            if before is not None:
                os.environ["TMPDIR"] = before

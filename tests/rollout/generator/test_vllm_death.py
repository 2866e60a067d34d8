"""Why an engine died is said by whoever tells of it, in whichever order its death is heard of.

vLLM's own thread and its answers hear of it, and so does this process, from the kernel. The core here is a process that
sleeps, with vLLM's words spoken for it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Coroutine, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from rl.config.failures import EngineDied
from rl.wire.messages import Generate, Version
from rl.wire.run import ProcessContext
from rollout.generator.engines.vllm import VllmEngine
from rollout.generator.engines.vllm_process import OwnProcess
from tests.conftest import MakeRun


class Sleeping(OwnProcess):
    """Its calls fail as vLLM's do once `heard` is set: its thread may be first, or last."""

    def __init__(self, process: BaseProcess) -> None:
        self.died = asyncio.get_running_loop().create_future()
        self._deaths = set()
        self._process = process
        self.heard = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._ended, process)

    @property
    def processes(self) -> list[BaseProcess]:
        return [self._process]

    async def rpc(self, method: str, *arguments: Any) -> list[Any]:
        await self.heard.wait()
        raise EngineDeadError

    async def begin(self, *_: Any) -> Any:
        await self.rpc("begin")


@pytest.fixture
def process() -> Iterator[BaseProcess]:
    sleeping = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
    sleeping.start()
    yield sleeping
    sleeping.kill()
    sleeping.join()


def call(engine: VllmEngine, name: str) -> Coroutine[Any, Any, Any]:
    if name == "load":
        return engine.load(Version(0, 1), [])
    prompt = np.array([1, 2], dtype=np.int32)
    request = Generate(1, 1, "train", Version(0, 0), prompt, 4, 1.0, 1.0, [])
    return engine.generate(request, lambda _: None)


@pytest.mark.parametrize("name", ["load", "generate"])
@pytest.mark.parametrize("first", ["vLLM", "the kernel"])
def test_the_reason_is_the_engines_whoever_hears_first(
    make_run: MakeRun, process: BaseProcess, name: str, first: str
) -> None:
    async def dies() -> None:
        engine = VllmEngine(ProcessContext(make_run(), 0, 0))
        core = engine._core = Sleeping(process)
        engine._open = True
        task = asyncio.create_task(call(engine, name))
        if first == "vLLM":
            core.heard.set()
            await asyncio.sleep(0.05)  # what was raised has gone as far as it goes
            process.kill()
        else:
            process.kill()
            await asyncio.shield(core.died)
            core.heard.set()
        await task

    with pytest.raises(EngineDied, match=f"vLLM's engine process {process.pid} was killed by SIGKILL"):
        asyncio.run(dies())


def test_an_engine_that_has_failed_and_does_not_end_is_named(
    make_run: MakeRun, process: BaseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.generator.engines.vllm._EXIT_S", 0.1)

    async def fails() -> None:
        engine = VllmEngine(ProcessContext(make_run(), 0, 0))
        core = engine._core = Sleeping(process)
        core.heard.set()
        await call(engine, "load")

    with pytest.raises(EngineDied, match=f"vLLM's engine process {process.pid} has failed, and does not end"):
        asyncio.run(fails())

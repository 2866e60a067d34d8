"""Why an engine died is said by whoever tells of it, in whichever order its death is heard of.

vLLM's own thread and its answers hear of it, and so does this process, from the kernel. The core here is a process that
sleeps, with vLLM's words spoken for it.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np
import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from rl.config.failures import EngineDied
from rl.wire.messages import Generate, Version
from rl.wire.run import ProcessContext
from rollout.generator.engines import vllm
from rollout.generator.engines.vllm import VllmEngine
from rollout.generator.engines.vllm_process import OwnProcess
from tests.conftest import MakeRun


class Sleeping(OwnProcess):
    """Its calls fail as vLLM's do once `heard` is set: its thread may be first, or last."""

    def __init__(self, process: BaseProcess) -> None:
        self._arguments: Any = SimpleNamespace(tensor_parallel_size=1, enable_sleep_mode=True)
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


class OneOfTwo(Sleeping):
    def __init__(self, process: BaseProcess, answer: str) -> None:
        super().__init__(process)
        self._arguments.tensor_parallel_size = 2
        self._llm: Any = Failing(answer)

    rpc = OwnProcess.rpc


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


class Failing:
    """vLLM's front end, whose core answers every call so."""

    def __init__(self, answer: str) -> None:
        self._answer = answer
        self.engine_core = self

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        await self._fail("collective_rpc")

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        await self._fail("pause_scheduler")

    async def pause_generation(self, mode: str, clear_cache: bool) -> None:
        await self._fail("pause_scheduler")

    async def sleep(self, level: int, mode: str) -> None:
        await self._fail("sleep")

    async def wake_up(self, tags: list[str]) -> None:
        await self._fail("wake_up")

    async def _fail(self, name: str) -> NoReturn:
        raise Exception(f"Call to {name} method failed: {self._answer}")


def asked_later() -> Any:
    """Of an executor that knows that a rank has died."""
    failed: Any = SimpleNamespace(rpc_broadcast_mq=object(), is_failed=True)
    return MultiprocExecutor.collective_rpc(failed, "load")


def waiting_already() -> Any:
    """For the answer of a rank, when its executor shuts down."""
    queue = MessageQueue(1, 1)
    waiting: Any = MessageQueue.create_from_handle(queue.export_handle(), 0)
    waiting.shutdown()
    return waiting.dequeue(timeout=60)


@pytest.mark.parametrize(("call", "answer"), [(asked_later, "Executor failed."), (waiting_already, "cancelled")])
def test_these_are_vllms_own_words(call: Callable[[], Any], answer: str) -> None:
    """What its core gives back to a call: the other tests say it in its place."""
    output = UtilityOutput(1)
    EngineCoreProc._invoke_utility_method("load", call, output, lambda _: None)
    assert output.failure_message == f"Call to load method failed: {answer}"


@pytest.mark.parametrize("answer", ["Executor failed.", "cancelled"])
def test_a_rank_that_dies_around_a_load_is_the_engines_death(
    make_run: MakeRun, process: BaseProcess, answer: str
) -> None:
    async def dies() -> None:
        engine = VllmEngine(ProcessContext(make_run(), 0, 0))
        core = engine._core = OneOfTwo(process, answer)
        task = asyncio.create_task(call(engine, "load"))
        await asyncio.sleep(0.05)
        process.kill()
        with pytest.raises(EngineDied, match=f"vLLM's engine process {process.pid} was killed by SIGKILL"):
            await task
        assert core.died.done()

    asyncio.run(dies())


@pytest.mark.parametrize(
    "call",
    [
        lambda core: core.pause("keep", clear_cache=True),
        lambda core: core.pause("keep", clear_cache=False),
        lambda core: core.pause("wait", clear_cache=True),
        lambda core: core.sleep(),
        lambda core: core.wake(resume=False),
    ],
)
def test_every_call_that_needs_all_ranks_tells_of_one_that_died(
    process: BaseProcess, call: Callable[[OwnProcess], Coroutine[Any, Any, None]]
) -> None:
    """A pause waits for the devices of all. The host may be out of memory when an engine has just left for it."""

    async def asks() -> None:
        core = OneOfTwo(process, "Executor failed.")
        core._adapter = None
        await call(core)

    with pytest.raises(EngineDeadError):
        asyncio.run(asks())


def test_a_rank_that_dies_as_an_engine_starts_is_the_engines_death(
    make_run: MakeRun, process: BaseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Starting(OneOfTwo):
        async def start(self) -> None:
            process.kill()

    monkeypatch.setattr(vllm, "engine_arguments", lambda _: (None, False))
    monkeypatch.setattr(vllm, "make_core", lambda *_: Starting(process, "Executor failed."))

    async def starts() -> None:
        await VllmEngine(ProcessContext(make_run(), 0, 0)).start()

    with pytest.raises(EngineDied, match=f"vLLM's engine process {process.pid} was killed by SIGKILL"):
        asyncio.run(starts())


def test_a_core_that_ends_its_other_ranks_first_is_waited_for(
    make_run: MakeRun, process: BaseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers at once, and ends when they have: it was told of as one that does not end."""
    monkeypatch.setattr(vllm, "_EXIT_S", 0.05)

    async def dies() -> None:
        engine = VllmEngine(ProcessContext(make_run(), 0, 0))
        engine._core = OneOfTwo(process, "Executor failed.")
        task = asyncio.create_task(call(engine, "load"))
        await asyncio.wait({task}, timeout=0.5)
        process.kill()
        await task

    with pytest.raises(EngineDied, match=f"vLLM's engine process {process.pid} was killed by SIGKILL"):
        asyncio.run(dies())


def test_a_load_that_fails_is_no_death(make_run: MakeRun, process: BaseProcess) -> None:
    async def fails() -> None:
        engine = VllmEngine(ProcessContext(make_run(), 0, 0))
        engine._core = OneOfTwo(process, "no such weight")
        await call(engine, "load")

    with pytest.raises(Exception, match="failed: no such weight"):
        asyncio.run(fails())


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

"""vLLM's core in a process of its own: AsyncLLM, the asyncio front end that vLLM has for it.

Of vLLM's own parts this uses what vLLM does not promise to keep; written for vllm 0.32.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import TokensInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from rl.config.failures import EngineDied
from rollout.generator.engines.copied import know_model, may_be_copies, set_how_to_begin
from rollout.generator.engines.owner import OWNER_VARIABLE, die_with_owner
from rollout.generator.engines.vllm_core import PauseMode
from rollout.generator.engines.vllm_settings import engine_death

_EXIT_CODE_S = 1.0
_RANKS_END_S = 10.0
"""For ranks that stand still when one has died: vLLM's core, which has said so, waits for them before it ends."""
_RANK_DIED = ("Executor failed.", "cancelled")
"""How a call fails that comes, or waits, when one of several ranks has died: the core is about to end."""


@contextlib.contextmanager
def _telling_deaths() -> Iterator[None]:
    """Around each call for which the core asks all ranks."""
    try:
        yield
    except Exception as error:
        if str(error).endswith(_RANK_DIED):
            raise EngineDeadError from error
        raise


class Stream:
    """One request, without what `AsyncLLM.generate` adds to each of its outputs."""

    def __init__(self, llm: AsyncLLM, outputs: RequestOutputCollector) -> None:
        self._llm = llm
        self._outputs = outputs
        self.request_id = outputs.request_id
        state = llm.output_processor.request_states.get(outputs.request_id)
        self.spans: list[tuple[str, int]] = state.weight_version_starts if state is not None else []

    async def next(self) -> RequestOutput:
        output = self._outputs.get_nowait() or await self._outputs.get()
        assert isinstance(output, RequestOutput)
        return output

    async def abort(self) -> None:
        await self._llm.abort(self.request_id, internal=True)

    def close(self) -> None:
        self._outputs.close()  # type: ignore[no-untyped-call]


class OwnProcess:
    """A core that is built, called and awaited in one asyncio loop."""

    def __init__(self, arguments: AsyncEngineArgs, adapter: LoRARequest | None) -> None:
        """adapter: what every request asks for."""
        self._arguments = arguments
        self._adapter = adapter
        self.died: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()
        self._deaths: set[asyncio.Task[None]] = set()

    async def death(self, patience_s: float) -> EngineDied:
        """The kernel's word. vLLM may have heard of the death before, or of a failure that the process outlives."""
        if self._arguments.tensor_parallel_size > 1:
            patience_s += _RANKS_END_S
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(asyncio.shield(self.died), patience_s)
        return engine_death(self.processes[0])

    async def start(self) -> None:
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        try:
            if copies := may_be_copies(self._arguments.tensor_parallel_size):
                os.register_at_fork(after_in_child=die_with_owner)
                know_model(Path(self._arguments.model))

            config = self._arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            set_how_to_begin(copies, str(config.device_config.device_type))
            self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        finally:
            del os.environ[OWNER_VARIABLE]  # of the engine's processes alone: what this one begins later is none
        self.config = self._llm.vllm_config
        await self._llm.get_supported_tasks()  # cached: add_request then reaches the core without a switch

        loop = asyncio.get_running_loop()
        for process in self.processes:
            loop.add_reader(process.sentinel, self._ended, process)

    @property
    def processes(self) -> list[BaseProcess]:
        """Those in which vLLM runs its core; with tensor parallelism the workers are their children."""
        client: Any = self._llm.engine_core
        return list(client.resources.engine_manager.processes)

    async def begin(self, name: str, prompt: TokensInput, parameters: SamplingParams, priority: int) -> Stream:
        added = await self._llm.add_request(name, prompt, parameters, lora_request=self._adapter, priority=priority)
        return Stream(self._llm, added)

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        with _telling_deaths():
            if mode == "keep" and clear_cache:
                # As below, without 20 ms of sleep at its end, by which callers have seen all outputs. Ours need not.
                await self._llm.engine_core.pause_scheduler_async(mode=mode, clear_cache=clear_cache)
            else:
                await self._llm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def sleep(self) -> None:
        if not self._arguments.enable_sleep_mode:
            await self.pause("keep", clear_cache=True)
            return
        # The next load replaces all weights, unless adapters stand on those of the files: these go to the host.
        with _telling_deaths():
            await self._llm.sleep(2 if self._adapter is None else 1, mode="keep")

    async def wake(self, *, resume: bool) -> None:
        if self._arguments.enable_sleep_mode:
            with _telling_deaths():
                await self._llm.wake_up(["kv_cache" if resume else "weights"])  # the last one resumes by itself
        elif resume:
            await self.resume()

    async def set_version(self, label: str) -> None:
        await self._llm.update_weight_version(label)

    async def rpc(self, method: str, *arguments: Any) -> list[Any]:
        with _telling_deaths():
            answers: list[Any] = await self._llm.collective_rpc(method, args=arguments)
            return answers

    def know_texts(self, reader: Any) -> None:
        self._llm.output_processor.tokenizer = reader

    def shutdown(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        for process in self.processes:
            loop.remove_reader(process.sentinel)
        self._llm.shutdown(timeout=timeout_s)
        del self._llm  # its finalizer needs modules that an ending interpreter has dropped

    def _ended(self, process: BaseProcess) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(process.sentinel)
        self._deaths.add(loop.create_task(self._tell(process)))

    async def _tell(self, process: BaseProcess) -> None:
        until = time.monotonic() + _EXIT_CODE_S
        while process.exitcode is None and time.monotonic() < until:  # a thread of vLLM may be reading it
            await asyncio.sleep(0.01)
        if not self.died.done():
            self.died.set_result(engine_death(process))

"""vLLM's core in a thread of the generator's own process.

The thread does everything that touches the core: it takes what was asked for, runs a step, and hands over the outputs
of the step, all of them at once. Between this and the asyncio loop go a queue of calls and one callback a step: no
message is encoded, and no process has to be waited for. While a step computes, the loop receives and sends.

OpenMP counts its threads for each thread that calls it, and what a fork server has set stays: both threads are told.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal, TypeVar, cast

import torch
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs.engine import TokensInput
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector

from rl.config.failures import EngineDied

T = TypeVar("T")
_set_num_threads = torch.set_num_threads  # vLLM puts a function that does nothing into its place


class Mailbox:
    """The answers to one request. vLLM's output processor puts into it, in the core's thread; `next` takes, in the
    loop's."""

    def __init__(self, core: OwnThread, request_id: str) -> None:
        self.spans: list[tuple[str, int]] = []
        self._core = core
        self.request_id = request_id
        self._outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()  # None: the core has died

    def put(self, output: RequestOutput) -> None:
        self._core.outputs.append((self, output))

    def delivered(self, output: RequestOutput | None) -> None:
        """Take one output, in the loop's thread."""
        self._outputs.put_nowait(output)

    async def next(self) -> RequestOutput:
        output = await self._outputs.get()
        if output is None:
            self.delivered(None)  # nothing else will come
            raise EngineDeadError from self._core.died.result()
        return output

    async def abort(self) -> None:
        self._core.abort(self.request_id)

    def close(self) -> None:
        self._core.streams.discard(self)


class OwnThread:
    """A core that is built, called and awaited in one asyncio loop."""

    def __init__(self, arguments: AsyncEngineArgs, threads: int, adapter: LoRARequest | None) -> None:
        """threads: of OpenMP, for a step. adapter: what every request asks for."""
        self._arguments = arguments
        self._adapter = adapter
        self._threads = threads
        self._loop = asyncio.get_running_loop()
        self.died: asyncio.Future[EngineDied] = self._loop.create_future()
        self.streams: set[Mailbox] = set()
        self.outputs: list[tuple[Mailbox, RequestOutput]] = []  # of the step that runs
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()  # None: the end
        self._drained: tuple[Future[None], bool] | None = None  # who waits, and whether to clear the cache
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    async def death(self, patience_s: float) -> EngineDied:
        return self.died.result()  # nobody else tells of it

    async def start(self) -> None:
        _set_num_threads(self._threads)
        self._engine = LLMEngine.from_engine_args(self._arguments, enable_multiprocessing=False)
        self.config = self._engine.vllm_config
        self._core: Any = cast(Any, self._engine.engine_core).engine_core
        self._tasks = self._engine.get_supported_tasks()
        self._thread.start()

    # ------------------------------------------------------------ the loop's side

    async def begin(self, name: str, prompt: TokensInput, parameters: SamplingParams, priority: int) -> Mailbox:
        if self.died.done():
            raise EngineDeadError from self.died.result()
        inputs = self._engine.input_processor
        request = inputs.process_inputs(
            name, prompt, parameters, supported_tasks=self._tasks, lora_request=self._adapter, priority=priority
        )
        inputs.assign_request_id(request)
        mailbox = Mailbox(self, request.request_id)
        self.streams.add(mailbox)
        processor = self._engine.output_processor

        def add() -> None:
            processor.add_request(request, None, None, 0, cast(RequestOutputCollector, mailbox))
            mailbox.spans = processor.request_states[request.request_id].weight_version_starts
            self._engine.engine_core.add_request(request)

        self._calls.put(add)
        return mailbox

    def abort(self, request_id: str) -> None:
        self._calls.put(lambda: self._engine.abort_request([request_id], internal=True))

    async def pause(self, mode: Literal["keep", "abort", "wait"], *, clear_cache: bool) -> None:
        if mode == "wait":
            await self._drain(clear_cache)
        elif mode == "abort":
            await self._call(lambda: self._pause_having_ended_all(clear_cache))
        else:
            await self._call(lambda: self._core.pause_scheduler(mode="keep", clear_cache=clear_cache))

    async def resume(self) -> None:
        await self._call(self._core.resume_scheduler)

    async def sleep(self) -> None:
        await self.pause("keep", clear_cache=True)

    async def wake(self, *, resume: bool) -> None:
        if resume:
            await self.resume()

    async def set_version(self, label: str) -> None:
        await self._call(lambda: self._core.set_weight_version(label))

    async def rpc(self, method: str, *arguments: Any) -> list[Any]:
        return await self._call(lambda: cast(list[Any], self._core.collective_rpc(method, args=arguments)))

    def know_texts(self, reader: Any) -> None:
        self._engine.output_processor.tokenizer = reader

    def shutdown(self, timeout_s: float) -> None:
        self._calls.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    async def _call(self, work: Callable[[], T]) -> T:
        """What it answers, or raises, in the core's thread. Raises EngineDeadError where that has ended."""
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        self._calls.put(call)
        return await self._done_or_dead(answer)

    async def _drain(self, clear_cache: bool) -> None:
        drained: Future[None] = Future()

        def begin() -> None:
            self._core.scheduler.set_pause_state(PauseState.PAUSED_NEW)
            self._drained = drained, clear_cache

        await self._call(begin)
        await self._done_or_dead(drained)

    async def _done_or_dead(self, answer: Future[T]) -> T:
        done = asyncio.wrap_future(answer)
        ends: set[asyncio.Future[Any]] = {done, self.died}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise EngineDeadError from self.died.result()
        return done.result()

    def _deliver(self, outputs: list[tuple[Mailbox, RequestOutput]]) -> None:
        for mailbox, output in outputs:
            mailbox.delivered(output)

    def _ended(self, error: BaseException) -> None:
        died = EngineDied(f"vLLM's engine failed with {type(error).__name__}: {error}")
        died.__cause__ = error
        if not self.died.done():
            self.died.set_result(died)
        for mailbox in self.streams:
            mailbox.delivered(None)

    # ------------------------------------------------------------ the core's thread

    def _run(self) -> None:
        try:
            _set_num_threads(self._threads)
            while self._carry_out_calls():
                self._engine.step()
                self._hand_over()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._ended, error)

    def _carry_out_calls(self) -> bool:
        """All that was asked for; where there is nothing to step, waits for more. False at the end."""
        while True:
            self._look_whether_drained()
            try:
                call = self._calls.get(block=not self._core.scheduler.has_requests())
            except queue.Empty:
                return True
            if call is None:
                return False
            call()
            self._hand_over()

    def _hand_over(self) -> None:
        if self.outputs:
            self._loop.call_soon_threadsafe(self._deliver, self.outputs)
            self.outputs = []

    def _pause_having_ended_all(self, clear_cache: bool) -> None:
        self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)
        self._core.pause_scheduler(mode="abort", clear_cache=clear_cache)

    def _look_whether_drained(self) -> None:
        """vLLM's own `wait` is for cores in a process of their own."""
        if self._drained is None or self._core.scheduler.get_num_unfinished_requests():
            return
        drained, clear_cache = self._drained
        self._drained = None
        self._core._finish_pause(clear_cache)
        drained.set_result(None)

"""vLLM's core as `VllmEngine` uses it: requests, pauses, calls into the workers; two forms behind one protocol.

* `OwnProcess` (`vllm_process.py`): vLLM's AsyncLLM, its core in a child process. On GPUs, and for tensor parallelism.
* `OwnThread` (`cpu/vllm_thread.py`): the core in a thread of the generator. On a CPU, where messages to a child and its
  turns on the cores cost more than a process beside the generator gains.

`generator.options.own_process` chooses.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal, Protocol

from vllm.config import VllmConfig
from vllm.inputs.engine import TokensInput
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from rl.config.failures import EngineDied

PauseMode = Literal["keep", "abort", "wait"]


class Stream(Protocol):
    """One request inside vLLM."""

    request_id: str
    """vLLM's name for it."""
    spans: list[tuple[str, int]]
    """(weight version, its first token): vLLM's own list, which grows while the request runs; empty at first."""

    async def next(self) -> RequestOutput:
        """What was sampled since the last call. Raises EngineDeadError."""

    async def abort(self) -> None:
        """End the request with what it has."""

    def close(self) -> None: ...


class Core(Protocol):
    """Calls are carried out in the order in which they are made."""

    config: VllmConfig
    died: asyncio.Future[EngineDied]
    """What ended the core, once it has ended by itself."""

    async def start(self) -> None: ...

    async def death(self, patience_s: float) -> EngineDied:
        """What ended the core, for whoever met an EngineDeadError: that may be known before the reason is."""

    async def begin(self, name: str, prompt: TokensInput, parameters: SamplingParams, priority: int) -> Stream:
        """Raises VLLMClientError for a request that does not fit."""

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop stepping: at once (`keep`), after ending all requests (`abort`), when those that run end (`wait`)."""

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Let go of the device's memory, as far as that is possible there; call it while paused. Caches are lost."""

    async def wake(self, *, resume: bool) -> None:
        """Have memory for the weights again; with `resume`, after that, for the cache as well, and go on."""

    async def set_version(self, label: str) -> None:
        """What the tokens of later steps are stamped with; call it while paused."""

    async def rpc(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of `LoadsWeights` on every rank."""

    def know_texts(self, reader: Any) -> None:
        """Requests with `SamplingParams.stop` end at these texts from now on; the core was started without a tokenizer.

        reader: transformers' tokenizer of what turns are read with. Others pay nothing: only requests with `detokenize`
        are given it.
        """

    def shutdown(self, timeout_s: float) -> None: ...

"""The real engine: vLLM's AsyncLLM behind the Engine protocol.

Invariants
* `logp` is of the distribution sampled from (temperature and top-p applied): `processed_logprobs`.
* A token's `policy_version` is that of the weights that sampled it. vLLM's engine process stamps every step's
  outputs with the weight version it was last told; we tell it while it is paused, between the loads of the old
  and of the new version, so the boundary is exact however far the consumer lags behind.
* No prefix cache of an older version serves a new episode: an update empties the cache (`recompute`, `abort`,
  `drain`), or the cache is salted with the version under which the episode began (`keep`).
* Weights arrive through `load` only, version 0 included; the model starts with dummy weights.

vLLM runs its engine core in a child process; this file is its asyncio front end. Sources: vllm 0.32,
`v1/engine/{async_llm,core,output_processor}.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from rl.core.messages import Generate, Version, WeightStatus
from rl.core.recent import Recent
from rl.core.run import ProcessContext
from rollout.generator.engines.base import EngineInfo, Sampled
from rollout.generator.engines.vllm_worker import OWNER_VARIABLE

_WORKER_EXTENSION = "rollout.generator.engines.vllm_worker.LoadsWeights"
_REPORT_EVERY = 16  # tokens between two outputs of one request: each costs a task switch
_PROBE_PRIORITY = -(1 << 31)  # before every request
_SESSIONS_REMEMBERED = 1 << 16
_FETCH_POLL_S = 0.005
_MIN_BATCHED_TOKENS = 8192
_CPU_BLOCK = 32  # vLLM's smallest on CPU


@dataclass
class _Flight:
    """One request inside the engine."""

    request: Generate
    sampled: Sampled = field(default_factory=Sampled)
    engine_id: str = ""  # vLLM's internal id of the current attempt
    spans: list[tuple[str, int]] = field(default_factory=list)  # (weight version, its first token), live
    gate: asyncio.Future[None] | None = None  # what the request waits on before it may enter the engine
    began_session: bool = False
    aborted: bool = False  # by the caller
    restart: bool = False  # the current attempt was discarded by an update
    discarded: int = 0  # tokens of earlier attempts


class VllmEngine:
    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._config = context.run.config
        self._flights: dict[int, _Flight] = {}
        self._salts: Recent[str] = Recent(_SESSIONS_REMEMBERED)  # session -> version under which it began (`keep`)
        self._version = Version(-1, -1)
        self.on_update = self._config.generator.on_update  # may be changed between two loads
        self._loading = asyncio.Lock()
        self._open = False  # false while weights are exchanged: new requests wait at their gates
        self._llm: AsyncLLM

    async def start(self) -> EngineInfo:
        os.environ[OWNER_VARIABLE] = str(os.getpid())
        arguments, untied = engine_arguments(self._context)
        self._llm = AsyncLLM.from_engine_args(arguments)
        await self._llm.get_supported_tasks()  # cached: add_request then reaches the core without a switch
        context = self._context
        await self._rpc("weights_open", str(context.run.folder), context.index, context.incarnation, untied)
        return _info(self._llm.vllm_config)

    async def stop(self) -> None:
        if not hasattr(self, "_llm"):  # start did not get that far
            return
        # An engine that has failed cannot answer, and its failure is the one to report, not this.
        with contextlib.suppress(EngineDeadError, TimeoutError):
            await self._rpc("weights_close", timeout_s=2.0)
        self._llm.shutdown(timeout=2.0)
        del self._llm  # its finalizer needs modules that an ending interpreter has dropped

    async def generate(self, request: Generate, progress: Callable[[Sampled], None]) -> Sampled:
        """Run one request to its end; ValueError if it does not fit the model (the engine goes on)."""
        flight = self._flights[request.request_id] = _Flight(request)
        try:
            while not flight.aborted:
                if not self._open:
                    flight.gate = asyncio.get_running_loop().create_future()
                    await flight.gate
                    continue

                await self._attempt(flight, progress)
                if not flight.restart:
                    break
                flight.restart = False
                flight.discarded += len(flight.sampled.token_ids)
                flight.sampled = Sampled()
        finally:
            del self._flights[request.request_id]

        sampled = flight.sampled
        sampled.finish_reason = sampled.finish_reason or "abort"
        sampled.tokens_generated = len(sampled.token_ids) + flight.discarded
        return sampled

    async def abort(self, request_id: int) -> None:
        flight = self._flights.get(request_id)
        if flight is not None:
            flight.aborted = True
            _open_gate(flight)
            if flight.engine_id:
                await self._llm.abort(flight.engine_id, internal=True)

    async def _attempt(self, flight: _Flight, progress: Callable[[Sampled], None]) -> None:
        """One pass of a request through vLLM, until it finishes or is aborted there."""
        request = flight.request
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=self._salt(flight))
        try:
            queue = await self._llm.add_request(
                str(request.request_id), prompt, sampling_params(request), priority=request.priority
            )
        except VLLMClientError as error:
            raise ValueError(f"request {request.request_id} refused by vLLM: {error}") from None
        flight.engine_id = queue.request_id
        flight.spans = self._version_spans(queue.request_id)

        try:
            if flight.aborted:  # while it was being added
                await self._llm.abort(queue.request_id, internal=True)
            while True:
                output = queue.get_nowait() or await queue.get()
                assert isinstance(output, RequestOutput)
                completion = output.outputs[0]
                _take(flight, completion)
                if output.finished:
                    break
                progress(flight.sampled)

        except asyncio.CancelledError:
            await self._llm.abort(queue.request_id, internal=True)
            raise
        finally:
            queue.close()  # type: ignore[no-untyped-call]
            flight.engine_id = ""

        if completion.finish_reason == "abort" and not flight.aborted:
            flight.restart = True
        else:
            flight.sampled.finish_reason = completion.finish_reason or ""
            if flight.sampled.token_ids:
                progress(flight.sampled)

    def _version_spans(self, engine_id: str) -> list[tuple[str, int]]:
        """(weight version, its first token) of one attempt: vLLM's own list, which grows while the request runs."""
        state = self._llm.output_processor.request_states.get(engine_id)
        return state.weight_version_starts if state is not None else []

    def _salt(self, flight: _Flight) -> str | None:
        """`keep` only: the version under which the episode began, so that its later turns find its own KV."""
        if self.on_update != "keep":
            return None  # each update empties the cache
        salt = self._salts.get(flight.request.session)
        if salt is None or flight.began_session:  # a restarted first request begins again
            flight.began_session = True
            salt = _label(self._version)
        self._salts.use(flight.request.session, salt)
        return salt

    async def load(self, version: Version, probe_ids: list[int]) -> WeightStatus:
        """Load `version` or a newer one. Raises if the weights cannot be read or do not fit: nothing resumes then."""
        async with self._loading:
            fetched = await self._fetch(version)
            self._open = False
            begin = time.monotonic()
            await self._pause()

            load_s = 0.0
            while True:
                parts = await self._rpc("weights_load")
                load_s += max(part["load_s"] for part in parts)
                if all(part["intact"] for part in parts):
                    checked = self._checked(version, parts)
                    break
                fetched = await self._fetch(version)  # torn: the writer took the slot back

            self._version = Version(fetched["epoch"], fetched["n"])
            await self._llm.update_weight_version(_label(self._version))
            probe = asyncio.create_task(self._probe(probe_ids))
            await asyncio.sleep(0)  # the probe is queued before anything else resumes
            await self._llm.resume_generation()

            self._open = True
            for flight in self._flights.values():
                _open_gate(flight)
            pause_s = time.monotonic() - begin

            return WeightStatus(
                self._context.index,
                self._context.incarnation,
                self._version,
                checksum=checked["checksum"],
                probe_logp=await probe,
                wait_s=fetched["wait_s"],
                pause_s=pause_s,
                copy_s=checked["copy_s"],
                load_s=load_s,
            )

    def _checked(self, version: Version, parts: list[dict[str, Any]]) -> dict[str, Any]:
        """What the slowest rank found. Raises if a rank found damage, or ranks found different bytes."""
        if errors := [part["error"] for part in parts if "error" in part]:
            raise self._unreadable(version, errors[0])
        if len(sums := {part["checksum"] for part in parts}) > 1:
            raise self._unreadable(version, f"its ranks received different bytes: checksums {sorted(sums)}")
        return max(parts, key=lambda part: part["copy_s"])

    def _unreadable(self, version: Version, why: str) -> RuntimeError:
        return RuntimeError(f"generator {self._context.index} could not read weights {version}: {why}")

    async def _fetch(self, version: Version) -> dict[str, Any]:
        """Lease the newest version on every rank, while generation goes on; the ranks agree on one."""
        deadline = time.monotonic() + 2 * self._config.weights.deadline_s
        while True:
            await self._rpc("weights_fetch", version.epoch, version.n)
            while not all(parts := await self._rpc("weights_fetched")):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"generator {self._context.index} waited for weights {version}")
                await asyncio.sleep(_FETCH_POLL_S)
            if errors := [part["error"] for part in parts if "error" in part]:
                raise self._unreadable(version, errors[0])

            leased = {Version(part["epoch"], part["n"]) for part in parts}
            if len(leased) == 1:
                return max(parts, key=lambda part: part["wait_s"])
            await self._rpc("weights_drop")
            version = max(leased)

    async def _pause(self) -> None:
        """Stop stepping, as `on_update` says; vLLM has processed every earlier output when this returns."""
        match self.on_update:
            case "recompute":
                await self._llm.pause_generation(mode="keep", clear_cache=True)
            case "abort":
                await self._llm.pause_generation(mode="abort", clear_cache=True)
            case "drain":
                await self._drain()
            case "keep":
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                for flight in list(self._flights.values()):
                    if flight.engine_id and flight.began_session and not flight.spans:
                        await self._llm.abort(flight.engine_id, internal=True)  # begins again, newly salted

    async def _drain(self) -> None:
        """Wait for the running requests, but not beyond the deadline: what still runs then is recomputed."""
        drained = asyncio.create_task(self._llm.pause_generation(mode="wait", clear_cache=True))
        done, _ = await asyncio.wait({drained}, timeout=self._config.generator.drain_deadline_s)
        if not done:
            await self._llm.pause_generation(mode="keep", clear_cache=True)
        await drained  # a full stop ends the wait as well

    async def _probe(self, probe_ids: list[int]) -> list[float]:
        """Log-probabilities of probe_ids[1:] at temperature 1, under the loaded weights."""
        if len(probe_ids) < 2:
            return []

        parameters = SamplingParams(
            max_tokens=1,
            temperature=1.0,
            prompt_logprobs=0,
            flat_logprobs=True,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

        prompt = tokens_input(probe_ids, cache_salt=f"probe {_label(self._version)}")
        async for output in self._llm.generate(prompt, parameters, "probe", priority=_PROBE_PRIORITY):
            scores = output.prompt_logprobs
        assert isinstance(scores, FlatLogprobs)
        return list(scores.logprobs)

    async def _rpc(self, method: str, *arguments: Any, timeout_s: float | None = None) -> list[Any]:
        """Call a method of `LoadsWeights` on every rank."""
        timeout_s = timeout_s or self._config.weights.deadline_s
        return await asyncio.wait_for(self._llm.collective_rpc(method, args=arguments), timeout_s)


def sampling_params(request: Generate) -> SamplingParams:
    """Only `stop_token_ids` end a response early; the stop id is sampled, so it is part of the result."""
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        seed=request.seed,
        stop_token_ids=request.stop_token_ids,
        ignore_eos=True,
        logprobs=0,  # the sampled token's
        flat_logprobs=True,  # lists of numbers, no dictionary per token
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,  # vLLM ignores the interval for cumulative outputs
        stream_interval=_REPORT_EVERY,
        skip_clone=True,
    )


def engine_arguments(context: ProcessContext) -> tuple[AsyncEngineArgs, bool]:
    """vLLM's arguments for this generator, and whether a tied model was given its own head.

    Tied embeddings are always untied: vLLM's CPU linear layers keep a repacked copy of the head, which an
    update of the embedding does not reach (7 nats wrong).
    """
    from transformers import AutoConfig

    config = context.run.config.generator
    on_cpu = context.run.device == "cpu"
    model = str(context.run.model_folder or context.run.config.model.path)
    tied = bool(AutoConfig.from_pretrained(model).tie_word_embeddings)
    arguments = AsyncEngineArgs(
        model=model,
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype=config.dtype,
        generation_config="vllm",  # the model folder's sampling defaults do not apply
        hf_overrides={"tie_word_embeddings": False} if tied else {},
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or max(config.max_model_len, _MIN_BATCHED_TOKENS),
        # A seeded request whose prefill is split kills vLLM's CPU engine ("CPU Generator does not use offset").
        enable_chunked_prefill=not on_cpu,
        enable_prefix_caching=True,
        scheduling_policy="priority",
        tensor_parallel_size=config.tensor_parallel,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        block_size=config.kv_block or (_CPU_BLOCK if on_cpu else None),
        enforce_eager=config.enforce_eager or on_cpu,
        logprobs_mode="processed_logprobs",
        max_logprobs=1,
        seed=(context.run.config.seed * 1009 + context.index) % (1 << 31),
        worker_extension_cls=_WORKER_EXTENSION,
        disable_log_stats=True,
        enable_log_requests=False,
    )
    return arguments, tied


def _info(config: VllmConfig) -> EngineInfo:
    cache = config.cache_config
    blocks_tokens = (cache.num_gpu_blocks or 0) * cache.block_size
    return EngineInfo(
        kv_tokens=cache.kv_cache_size_tokens or blocks_tokens,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_model_len=config.model_config.max_model_len,
    )


def _take(flight: _Flight, completion: CompletionOutput) -> None:
    """Append a delta with its versions; the lists of a Sampled always have one length."""
    sampled = flight.sampled
    new = completion.token_ids
    if not new:
        return
    assert isinstance(completion.logprobs, FlatLogprobs)
    known = len(sampled.token_ids)
    total = known + len(new)
    sampled.token_ids.extend(new)
    sampled.logp.extend(completion.logprobs.logprobs)

    spans = flight.spans or [(span.version, span.start) for span in completion.weight_versions or ()]
    for position, (label, start) in enumerate(spans):
        end = spans[position + 1][1] if position + 1 < len(spans) else total
        first = max(start, known)
        last = min(end, total)
        if last > first:
            sampled.policy_version.extend([int(label.partition(".")[2])] * (last - first))
    sampled.tokens_generated = total + flight.discarded


def _label(version: Version) -> str:
    return f"{version.epoch}.{version.n}"


def _open_gate(flight: _Flight) -> None:
    if flight.gate is not None and not flight.gate.done():
        flight.gate.set_result(None)

"""The real engine: vLLM's AsyncLLM behind the Engine protocol.

Invariants
* `logp` is of the distribution sampled from (temperature and top-p applied): `processed_logprobs`.
* A token's `policy_version` is that of the weights that sampled it. The engine process of vLLM stamps every step's
  outputs with the weight version it was last told. We tell it while it is paused, between the loads of the old and of
  the new version, so the boundary is exact however far the consumer lags behind.
* No prefix cache of an older version serves a new episode. An update empties the cache (`recompute`, `abort`, `drain`),
  or the cache is salted with the version under which the episode began (`keep`).
* Weights arrive through `load` only, version 0 included; the model starts with dummy weights.

Where vLLM's core runs, in a child process or in a thread, is the matter of `vllm_core.py`. Sources: vllm 0.32,
`v1/engine/{async_llm,core,output_processor}.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from transformers import TokenizersBackend
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMClientError
from vllm.inputs.engine import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from rl.store.recent import Recent
from rl.wire.columns import COLUMNS, ROUTED_EXPERTS
from rl.wire.messages import Generate, Version, WeightStatus
from rl.wire.run import ProcessContext, RunFile, socket_name
from rollout.generator.engines.base import DRAIN_S, EngineInfo, Sampled
from rollout.generator.engines.cpu.unpacked import heed_environment
from rollout.generator.engines.cpu.vllm_thread import OwnThread
from rollout.generator.engines.routing import first_position, set_routing
from rollout.generator.engines.vllm_adapter import adapter_of
from rollout.generator.engines.vllm_core import Core, Stream
from rollout.generator.engines.vllm_process import OwnProcess
from rollout.generator.engines.vllm_settings import engine_arguments, engine_info, in_own_process, sampling_params

_PROBE_PRIORITY = -(1 << 31)  # before every request
_SESSIONS_REMEMBERED = 1 << 16
_FETCH_POLLS_S = 0.0005, 0.005  # the first, and the longest: most leases are there at once
_EXIT_S = 2.0  # longest last answer of an engine, and end of one that has said that it has failed


@dataclass
class _Running:
    """One request until it is answered. An `abort` update discards an attempt, and the next one begins again."""

    request: Generate
    sampled: Sampled = field(default_factory=Sampled)  # by the present attempt
    discarded: int = 0  # tokens of earlier starts
    stream: Stream | None = None  # None: outside vLLM, between two starts or at the gate
    gate: asyncio.Future[None] | None = None  # set by the end of a load, or by an abort
    aborted: bool = False  # by the caller
    began_episode: bool = False  # its first token decides on which version's cache the episode runs (`keep`)


class VllmEngine:
    def __init__(self, context: ProcessContext) -> None:
        self._context = context
        self._config = context.run.config
        self._on_cpu = context.run.device == "cpu"
        self._routing = COLUMNS.get(ROUTED_EXPERTS)
        self._running: dict[int, _Running] = {}  # by request id
        self._salts: Recent[str] = Recent(_SESSIONS_REMEMBERED)  # session -> version under which it began (`keep`)
        self._version = Version(-1, -1)
        self.on_update = self._config.generator.on_update  # may be changed between two loads
        self._loading = asyncio.Lock()
        self._knows_texts = False

        self._open = False  # false while weights are exchanged: new requests wait at their gates
        self._resting = False
        self._core: Core

    async def start(self) -> EngineInfo:
        heed_environment()
        arguments, untied = engine_arguments(self._context)
        core = make_core(self._context.run, arguments)
        await core.start()
        self._core = core

        context = self._context
        folder = context.run.folder
        file = context.run.socket_folder / f"load.{context.index}"
        self._progress = np.memmap(file, np.uint64, "w+", shape=(self._config.generator.tensor_parallel,))
        async with self._death_explained():
            await core.rpc("weights_open", str(folder), context.index, context.incarnation, untied, str(file))
            if self._routing is not None and self._on_cpu:
                await core.rpc("routing_open", self._routing.dtype)
        return engine_info(core.config)

    async def watch(self) -> None:
        raise await asyncio.shield(self._core.died)

    async def stop(self) -> None:
        if not hasattr(self, "_core"):  # start did not get that far
            return
        if not self._core.died.done():
            with contextlib.suppress(EngineDeadError, TimeoutError):  # what ended the engine is reported, not this
                await asyncio.wait_for(self._core.rpc("weights_close"), _EXIT_S)
        self._core.shutdown(_EXIT_S)

    async def generate(self, request: Generate, progress: Callable[[Sampled], None]) -> Sampled:
        """Run one request to its end; ValueError if it does not fit the model (the engine goes on)."""
        running = self._running[request.request_id] = _Running(request)
        try:
            async with self._death_explained():
                await self._until_answered(running, progress)

        finally:
            del self._running[request.request_id]

        sampled = running.sampled
        sampled.finish_reason = sampled.finish_reason or "abort"
        sampled.tokens_generated = len(sampled.token_ids) + running.discarded
        return sampled

    async def abort(self, request_id: int) -> None:
        running = self._running.get(request_id)
        if running is not None:
            running.aborted = True
            _open_gate(running)
            if running.stream is not None:
                await running.stream.abort()

    async def _until_answered(self, running: _Running, progress: Callable[[Sampled], None]) -> None:
        while not running.aborted:
            if not self._open:
                running.gate = asyncio.get_running_loop().create_future()
                await running.gate
                continue

            reason = await self._attempt(running, progress)
            if reason != "abort" or running.aborted:
                running.sampled.finish_reason = reason
                return
            running.discarded += len(running.sampled.token_ids)
            running.sampled = Sampled()

    @contextlib.asynccontextmanager
    async def _death_explained(self) -> AsyncIterator[None]:
        """vLLM's own error says that its core is dead, and not why; and it may come before the reason is known."""
        with contextlib.suppress(EngineDeadError):
            yield
            return
        raise await self._core.death(_EXIT_S)

    async def _attempt(self, running: _Running, progress: Callable[[Sampled], None]) -> str:
        """One pass of a request through vLLM, and why it ended: `abort` by the caller or by an update."""
        request = running.request
        if request.stop and not self._knows_texts:
            self._knows_texts = True
            path = Path(self._core.config.model_config.model) / "tokenizer.json"
            self._core.know_texts(TokenizersBackend(tokenizer_file=str(path)))
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=self._salt(running))
        name = str(request.request_id)
        try:
            stream = await self._core.begin(name, prompt, sampling_params(request), request.priority)
        except VLLMClientError as error:
            raise ValueError(f"request {name} refused by vLLM: {error}") from None

        running.stream = stream
        try:
            if running.aborted:  # while it was being added
                await stream.abort()

            finished = False
            while not finished:
                output = await stream.next()
                completion, finished = output.outputs[0], output.finished
                _take(running, stream.spans, completion)
                if running.sampled.token_ids and not finished:
                    progress(running.sampled)
            if self._routing is not None:
                await self._add_routing(running, stream, completion.routed_experts)
            return completion.finish_reason or ""

        except asyncio.CancelledError:
            await stream.abort()
            raise
        finally:
            stream.close()
            running.stream = None

    async def _add_routing(self, running: _Running, stream: Stream, rows: np.ndarray | None) -> None:
        """The column of what a request has read and sampled. rows: as vLLM tells them on GPUs."""
        column = self._routing
        assert column is not None
        if self._on_cpu:
            (told, *_) = await self._core.rpc("routing_take", stream.request_id)
            first = first_position(running.request)
            known = None if told is None else np.frombuffer(told, column.dtype).reshape(-1, *column.entry_shape)
            rows = None if known is None else known[first:]
        set_routing(running.sampled, running.request, column, rows)

    def _salt(self, running: _Running) -> str | None:
        """What a request's cached prefix must have been computed with, besides equal tokens: its episode's version.

        `keep` only, so that later turns of an episode find its own KV and new episodes none of an older version; every
        other policy empties the cache.
        """
        if self.on_update != "keep":
            return None
        salt = self._salts.get(running.request.session)
        if salt is None or running.began_episode:  # an episode begins; again, after an update before its first token
            running.began_episode = True
            salt = _label(self._version)
        self._salts.use(running.request.session, salt)
        return salt

    async def rest(self) -> None:
        async with self._loading, self._death_explained():
            self._open = False
            await self._pause()
            await self._core.sleep()
            await self._core.rpc("turn", False)
            self._resting = True

    def loaded(self) -> int:
        return int(self._progress.sum())

    async def load(self, version: Version, probe_ids: list[int]) -> WeightStatus:
        """Load `version` or a newer one. Raises if the weights cannot be read or do not fit: nothing resumes then."""
        async with self._loading, self._death_explained():
            fetched = await self._fetch(version)
            self._open = False
            begin = time.monotonic()
            drain_s = 0.0
            if self._resting:
                await self._core.rpc("turn", True)
                await self._core.wake(resume=False)
            else:
                await self._pause()
                drain_s = time.monotonic() - begin

            load_s = 0.0
            while True:
                parts = await self._core.rpc("weights_load")
                load_s += max(part["load_s"] for part in parts)
                if all(part["intact"] for part in parts):
                    break
                fetched = await self._fetch(version)  # torn: the writer took the slot back

            self._version = Version(fetched["timeline"], fetched["n"])
            told = asyncio.create_task(self._core.set_version(_label(self._version)))
            probe = asyncio.create_task(self._probe(probe_ids))
            await asyncio.sleep(0)  # both are queued, in this order, before anything resumes
            if self._resting:
                await self._core.wake(resume=True)
                self._resting = False
            else:
                await self._core.resume()
            await told

            self._open = True
            for running in self._running.values():
                _open_gate(running)
            seconds = {"drain": drain_s, "pause": time.monotonic() - begin, "load": load_s}

            return WeightStatus(
                self._context.index,
                self._context.incarnation,
                self._version,
                checksum=fetched["checksum"],
                probe_ids=probe_ids,
                probe_logp=await probe,
                seconds={"wait": fetched["wait_s"], "copy": fetched["copy_s"], **seconds},
            )

    def _unreadable(self, version: Version, why: str) -> RuntimeError:
        return RuntimeError(f"generator {self._context.index} could not read weights {version}: {why}")

    async def _fetch(self, version: Version) -> dict[str, Any]:
        """Take the newest version on every rank, and prove it, while generation goes on; the ranks agree on one.

        Raises if a rank found damage, or ranks found different bytes.
        """
        while True:
            await self._core.rpc("weights_fetch", version.timeline, version.n)
            pause_s, longest_s = _FETCH_POLLS_S
            while not all(parts := await self._core.rpc("weights_fetched", self._ranks())):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, longest_s)
            if errors := [part["error"] for part in parts if "error" in part]:
                raise self._unreadable(version, errors[0])

            taken = {Version(part["timeline"], part["n"]) for part in parts}
            sums = {part["checksum"] for part in parts}
            if len(taken) == len(sums) == 1:
                return max(parts, key=lambda part: part["wait_s"] + part["copy_s"])

            intact = all(await self._core.rpc("weights_drop"))
            if len(taken) == 1 and intact:
                raise self._unreadable(version, f"its ranks received different bytes: {sorted(map(str, sums))}")
            version = max(taken)

    def _ranks(self) -> dict[str, str]:
        """Where the learner's ranks serve weights, as far as that is known, for workers that have no control socket."""
        names = (socket_name("blobs", rank) for rank in range(self._config.learner.ranks))
        found = {name: self._context.run.address_of(name) for name in names}
        return {name: endpoint for name, endpoint in found.items() if endpoint is not None}

    async def _pause(self) -> None:
        """Stop stepping, as `on_update` says."""
        match self.on_update:
            case "recompute":
                await self._core.pause("keep", clear_cache=True)
            case "abort":
                await self._core.pause("abort", clear_cache=True)
            case "drain":
                await self._drain()
            case "keep":
                await self._core.pause("keep", clear_cache=False)
                for running in list(self._running.values()):
                    if running.stream is not None and running.began_episode and not running.stream.spans:
                        await running.stream.abort()  # it has no token yet: it begins again, newly salted

    async def _drain(self) -> None:
        """Wait for the running requests, but not beyond the deadline: what still runs then is recomputed."""
        drained = asyncio.create_task(self._core.pause("wait", clear_cache=True))
        done, _ = await asyncio.wait({drained}, timeout=DRAIN_S)
        if not done:
            await self._core.pause("keep", clear_cache=True)
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
        stream = await self._core.begin("probe", prompt, parameters, _PROBE_PRIORITY)
        try:
            scores = (await stream.next()).prompt_logprobs
        finally:
            stream.close()
        assert isinstance(scores, FlatLogprobs)
        return list(scores.logprobs)


def make_core(run: RunFile, arguments: AsyncEngineArgs) -> Core:
    """The core in the form that `generator.options.own_process` asks for; not started."""
    adapter = adapter_of(arguments)
    if in_own_process(run):
        return OwnProcess(arguments, adapter)
    return OwnThread(arguments, run.config.generator.threads, adapter)


def _take(running: _Running, live_spans: list[tuple[str, int]], completion: CompletionOutput) -> None:
    """Append a delta with its versions; the lists of a Sampled always have one length."""
    sampled = running.sampled
    new = completion.token_ids
    if not new:
        return
    assert isinstance(completion.logprobs, FlatLogprobs)
    known = len(sampled.token_ids)
    total = known + len(new)
    sampled.token_ids.extend(new)
    sampled.logp.extend(completion.logprobs.logprobs)

    spans = live_spans or [(span.version, span.start) for span in completion.weight_versions or ()]
    for position, (label, start) in enumerate(spans):
        end = spans[position + 1][1] if position + 1 < len(spans) else total
        first = max(start, known)
        last = min(end, total)
        if last > first:
            sampled.policy_version.extend([int(label.partition(".")[2])] * (last - first))
    sampled.tokens_generated = total + running.discarded


def _label(version: Version) -> str:
    return f"{version.timeline}.{version.n}"


def _open_gate(running: _Running) -> None:
    if running.gate is not None and not running.gate.done():
        running.gate.set_result(None)

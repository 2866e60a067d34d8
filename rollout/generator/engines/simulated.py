"""An engine that only takes the time: no model, no torch, but the protocol and the update semantics of a real one.

What a request yields (length, ids, log-probabilities) depends on its seed alone (`request.seed`, or a hash of
prompt and session), never on what else runs. Only the policy versions of its tokens depend on when it ran. One loop
task moves the batch in ticks of several milliseconds, many decode steps each, so that a thousand running sequences cost
a few percent of a core.
"""

from __future__ import annotations

import asyncio
import math
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl.config.plugins import validated
from rl.store.recent import Recent
from rl.weights import make_receiver
from rl.weights.channel import Receiver
from rl.wire.columns import BUILT_IN, ONE_TURN, carried, masked_context
from rl.wire.messages import Generate, Version, WeightStatus
from rl.wire.run import ProcessContext
from rollout.generator.engines.base import DRAIN_S, EngineInfo, Sampled
from rollout.generator.engines.timing import BatchModel, SimulatedOptions

_TICK_S = 0.005
_LONGEST_TICK_S = 0.05  # token counts are reported at least this often
_SESSIONS_CACHED = 4096

Progress = Callable[[Sampled], None]


@dataclass(eq=False)
class _Job:
    key: int  # request id
    session: int
    prompt_len: int
    known: int  # of the prompt
    token_ids: list[int]  # all that will be sampled
    finish_reason: str
    progress: Progress
    done: asyncio.Future[None]
    sampled: Sampled = field(default_factory=Sampled)
    discarded: int = 0  # tokens thrown away by `abort` updates


class SimulatedEngine:
    def __init__(self, context: ProcessContext, receiver: Receiver | None = None) -> None:
        config = context.run.config
        self._context = context
        self._config = config.generator
        self._deadline_s = config.weights.deadline_s
        self._receiver = receiver
        self._loaded = 0
        self._options: SimulatedOptions = validated(SimulatedOptions, config.generator.options, "generator.options")
        self._further = [column for column in carried(producer="generator") if column.name not in BUILT_IN]
        self._logp = -math.log(self._options.vocab_size)
        self._model = BatchModel(self._options, config.generator.max_num_seqs, time.monotonic())

        self._jobs: dict[int, _Job] = {}
        self._parked: list[_Job] | None = None  # arrivals during a drain
        self._cached: Recent[int] = Recent(_SESSIONS_CACHED)  # session -> context tokens in the prefix cache
        self._vocabularies: dict[tuple[int, ...], np.ndarray] = {}  # by stop ids: what may be sampled before the end
        self._version = Version(-1, -1)

        self._wake = asyncio.Event()
        self._drained = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._resting = False

    async def start(self) -> EngineInfo:
        if self._receiver is None:
            name = f"generator-{self._context.index}-0"
            self._receiver = make_receiver(self._context.run, name, self._context.incarnation)
        self._loop_task = asyncio.create_task(self._decode_loop(), name="simulated decoding")
        # Every sequence has room for a whole context: KV memory never binds.
        sequences = self._config.max_num_seqs
        return EngineInfo(sequences * self._config.max_model_len, sequences, self._config.max_model_len)

    async def watch(self) -> None:
        assert self._loop_task is not None
        await asyncio.shield(self._loop_task)

    async def stop(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
            await asyncio.wait({self._loop_task})
        if self._receiver is not None:
            self._receiver.close()

    async def generate(self, request: Generate, progress: Progress) -> Sampled:
        token_ids, finish_reason = self._response(request)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        prompt = request.prompt_ids.size, request.known
        job = _Job(request.request_id, request.session, *prompt, token_ids, finish_reason, progress, done)
        self._jobs[job.key] = job

        if self._parked is not None:
            self._parked.append(job)
        else:
            self._submit(job)

        try:
            await done
        except asyncio.CancelledError:
            await self.abort(job.key)
            raise
        return job.sampled

    async def abort(self, request_id: int) -> None:
        self._advance()
        job = self._jobs.get(request_id)
        if job is not None:
            self._model.remove(job.key)
            self._finish(job, "abort")

    async def rest(self) -> None:
        if self._config.on_update == "drain":
            await self._drain()
        self._advance()
        self._model.stall(math.inf, recompute=False)
        self._cached.clear()
        self._resting = True

    def loaded(self) -> int:
        return self._loaded + (self._receiver.progress if self._receiver else 0)

    async def load(self, version: Version, probe_ids: list[int]) -> WeightStatus:
        begin = time.monotonic()
        loaded, checksum, taken = await asyncio.to_thread(self._receive, version)
        copied = time.monotonic()

        on_update = self._config.on_update
        if on_update == "drain" and not self._resting:
            await self._drain()
        self._advance()

        if self._resting:
            self._model.wake()

        paused = time.monotonic()
        load_s = self._options.load_s
        self._model.stall(load_s, recompute=self._resting or on_update in ("recompute", "drain"))
        self._resting = False
        self._version = loaded
        if on_update != "keep":
            self._cached.clear()
        if on_update == "abort":
            self._restart_all()
        self._release_parked()
        self._wake.set()

        while (left_s := paused + load_s - time.monotonic()) > 0:
            await asyncio.sleep(min(left_s, _LONGEST_TICK_S))
            self._loaded += 1

        done = time.monotonic()
        return WeightStatus(
            self._context.index,
            self._context.incarnation,
            loaded,
            checksum=checksum,
            probe_ids=probe_ids,
            probe_logp=[self._logp] * max(0, len(probe_ids) - 1),
            seconds={
                "wait": taken - begin,
                "copy": copied - taken,
                "drain": paused - copied,
                "pause": done - copied,
                "load": done - paused,
            },
        )

    # ------------------------------------------------------------ weights

    def _receive(self, version: Version) -> tuple[Version, int | None, float]:
        """Take the newest weights (a thread) and look at no tensor: version, receipt, and when it was taken."""
        receiver = self._receiver
        assert receiver is not None
        while True:
            loaded, _ = receiver.take(version, self._deadline_s)
            taken = time.monotonic()
            receipt = receiver.receipt()
            if receiver.release():
                return loaded, receipt, taken

    async def _drain(self) -> None:
        """Go on until nothing runs, at most DRAIN_S; arrivals wait for the new weights."""
        self._parked = []
        self._drained.clear()
        if len(self._model):
            try:
                await asyncio.wait_for(self._drained.wait(), DRAIN_S)
            except TimeoutError:
                pass  # what still runs is recomputed

    def _release_parked(self) -> None:
        parked = self._parked or []
        self._parked = None
        for job in parked:
            if not job.done.done():
                self._submit(job)

    def _restart_all(self) -> None:
        """`abort` update: what was sampled so far is discarded, but stays counted."""
        for job in [job for job in self._jobs.values() if job.key in self._model]:
            self._model.remove(job.key)
            job.discarded = job.sampled.tokens_generated
            job.sampled = Sampled(tokens_generated=job.discarded)
            self._enter(job)

    # ------------------------------------------------------------ the batch

    def _response(self, request: Generate) -> tuple[list[int], str]:
        seed = request.seed
        if seed is None:
            seed = zlib.crc32(request.prompt_ids.data) << 32 | request.session & 0xFFFFFFFF
        seed &= (1 << 63) - 1
        length = self._options.response_length(seed)
        reason = "length" if length >= request.max_tokens else "stop"

        stop_ids = tuple(request.stop_token_ids)
        vocabulary = self._vocabularies.get(stop_ids)
        if vocabulary is None:
            vocabulary = np.setdiff1d(np.arange(1, self._options.vocab_size), stop_ids)
            self._vocabularies[stop_ids] = vocabulary
        ids = np.random.default_rng(seed).choice(vocabulary, min(length, request.max_tokens)).tolist()
        if reason == "stop" and stop_ids:
            ids[-1] = stop_ids[0]
        return ids, reason

    def _submit(self, job: _Job) -> None:
        self._advance()
        self._enter(job)
        self._wake.set()

    def _enter(self, job: _Job) -> None:
        prefill = max(0, job.prompt_len - self._cached.get(job.session, 0))
        self._model.add(job.key, job.prompt_len, prefill, len(job.token_ids))

    async def _decode_loop(self) -> None:
        while True:
            self._advance()
            self._wake.clear()
            due = self._model.next_event()
            if due is None:
                await self._wake.wait()
            else:
                await asyncio.sleep(min(max(due - time.monotonic(), _TICK_S), _LONGEST_TICK_S))

    def _advance(self) -> None:
        """Bring the batch and every running result up to now."""
        for event in self._model.advance(time.monotonic()):
            if event.kind == "finished":
                job = self._jobs[event.key]
                self._grow(job, len(job.token_ids), ended=True)
                self._finish(job, job.finish_reason)
        for job in self._jobs.values():
            if job.key in self._model:
                self._grow(job, self._model.tokens(job.key))

    def _grow(self, job: _Job, tokens: int, *, ended: bool = False) -> None:
        sampled = job.sampled
        new = tokens - len(sampled.token_ids)
        if new <= 0:
            return
        sampled.token_ids += job.token_ids[tokens - new : tokens]
        sampled.logp += [self._logp] * new
        sampled.policy_version += [self._version.n] * new
        sampled.tokens_generated = job.discarded + tokens
        if self._further:
            sampled.columns = self._further_columns(tokens)
        if not ended:
            job.progress(sampled)

    def _finish(self, job: _Job, reason: str) -> None:
        del self._jobs[job.key]
        job.sampled.finish_reason = reason
        job.sampled.context = masked_context(job.prompt_len - job.known)
        if not job.done.done():
            job.done.set_result(None)
        self._cached.use(job.session, job.prompt_len + len(job.sampled.token_ids))
        if not len(self._model):
            self._drained.set()

    def _further_columns(self, tokens: int) -> dict[str, Any]:
        """Masked values of whatever else this run's generators are to answer."""
        entries = {"token": tokens, **ONE_TURN}
        made = {column: column.full(entries[column.scope]) for column in self._further}
        return {column.name: values if column.scope == "token" else values[0] for column, values in made.items()}

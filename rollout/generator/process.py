"""A generator process: one inference engine, its requests, and the weights that arrive while they run.

    python -m rollout.generator.process --run DIR --index I --incarnation K

* A request runs only on weights of its epoch that are not older than its gate (F2); until then it is held here.
* Every request is answered exactly once, an aborted one with what it had generated.
* Weights are loaded one version at a time, always the newest that was announced; versions between are skipped.
  Weights that do not arrive are an error that ends the process, not a slow decline of the reward.
* A failure of the engine ends the process; its requests are then the proxy's to send again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

import zmq
import zmq.asyncio
from msgspec.structs import replace

from rl.core.messages import (
    Abort,
    FirstToken,
    Generate,
    Generated,
    GeneratorHello,
    GeneratorStatus,
    Message,
    ProtocolError,
    Version,
    WeightNotice,
    WeightStatus,
    decode,
    encode,
)
from rl.core.process import Process
from rl.core.run import ProcessContext, context_from_command_line
from rl.core.sockets import identity, open_socket
from rollout.generator.engines import make_engine
from rollout.generator.engines.base import Engine, Sampled
from rollout.generator.gate import Gate

NOTHING_LOADED = Version(-1, -1)  # older than any gate


class _Job:
    """A request that has not been answered."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.arrived = time.monotonic()
        self.started: float | None = None  # None: held
        self.tokens = 0  # sampled so far, discarded ones included
        self.first_version: int | None = None
        self.aborted = False


class Generator:
    """Sockets and tasks around an engine; `serve` runs until the supervisor says stop or something fails."""

    def __init__(self, process: Process, engine: Engine, context: zmq.asyncio.Context) -> None:
        run, me = process.run, identity("generator", process.index, process.incarnation)
        self._process, self._engine = process, engine
        awaitable = partial(cast(Callable[..., zmq.asyncio.Socket], open_socket), context=context)
        self._backend = awaitable(zmq.DEALER, run, "backend", identity=me)
        self._notices = awaitable(zmq.PULL, run, "notices", process.index, bind=True)
        self._learner = awaitable(zmq.DEALER, run, "weight_status", identity=me)
        self._status = WeightStatus(process.index, process.incarnation, NOTHING_LOADED)
        self._jobs: dict[int, _Job] = {}  # by request id
        self._gate: Gate[int] = Gate()  # request ids; answered ones are dropped lazily
        self._running = 0
        self._loading = False
        self._loads = self._malformed = self._tokens = 0
        self._busy_s = self._idle_s = 0.0
        self._counted = time.monotonic()  # until when busy_s and idle_s are counted
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def version(self) -> Version:
        return self._status.version

    async def serve(self) -> None:
        """Raises what the engine, a load or a socket raised first; returns when the supervisor says stop."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.wake_fd, self._read_inbox)
        try:
            self._spawn(self._start())
            await self._ended
        finally:
            loop.remove_reader(self._process.wake_fd)
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            await self._engine.stop()

    async def _start(self) -> None:
        info = await self._engine.start()
        hello = GeneratorHello(
            self._process.index, self._process.incarnation, info.kv_tokens, info.max_num_seqs, info.max_model_len,
            self.version,
        )  # fmt: skip
        self._send(self._backend, hello)
        for work in (self._serve_requests(), self._serve_notices(), self._report()):
            self._spawn(work)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _read_inbox(self) -> None:
        for _ in self._process.received():
            pass  # only Stop concerns a generator, and the process has noted it
        if self._process.stopping and not self._ended.done():
            self._ended.set_result(None)

    def _send(self, socket: zmq.asyncio.Socket, message: Message) -> None:
        """At once: flow control is by credit, so a full queue is an error (zmq.Again)."""
        sent = socket.send_multipart(encode(message), zmq.DONTWAIT, copy=False)
        assert isinstance(sent, asyncio.Future)
        sent.result()

    async def _receive(self, socket: zmq.asyncio.Socket) -> Message | None:
        """None for what is no message: it costs its sender an answer, not everyone the generator."""
        try:
            return decode(await socket.recv_multipart())
        except ProtocolError as error:
            self._malformed += 1
            print(f"generator: message {self._malformed} ignored: {error}", file=sys.stderr, flush=True)
            return None

    # ------------------------------------------------------------ requests

    async def _serve_requests(self) -> None:
        while True:
            match await self._receive(self._backend):
                case Generate() as request:
                    job = self._jobs[request.request_id] = _Job(request)
                    if self._gate.admit(request.version, request.request_id, self.version):
                        self._run(job)
                case Abort(request_id):
                    self._abort(request_id)

    def _release_held(self) -> None:
        for request_id in self._gate.release(self.version):
            job = self._jobs.get(request_id)
            if job is not None:
                self._run(job)

    def _run(self, job: _Job) -> None:
        """The gate is open: run it, unless its epoch is over."""
        epoch = job.request.version.epoch
        if epoch != self.version.epoch:
            self._answer(job, Sampled(finish_reason="error"), f"epoch {epoch} is over; this is {self.version.epoch}")
            return
        job.started = time.monotonic()
        self._count(running=+1)
        self._spawn(self._generate(job))

    async def _generate(self, job: _Job) -> None:
        error = ""
        try:
            if job.aborted:  # before the engine has seen it
                sampled = Sampled(finish_reason="abort")
            else:
                sampled = await self._engine.generate(job.request, partial(self._progress, job))
        except ValueError as refused:  # the engine cannot run this request, but others
            sampled, error = Sampled(finish_reason="error", tokens_generated=job.tokens), str(refused)
        finally:
            self._count(running=-1)
        self._progress(job, sampled)
        self._answer(job, sampled, error)

    def _progress(self, job: _Job, sampled: Sampled) -> None:
        new = sampled.tokens_generated - job.tokens
        job.tokens = sampled.tokens_generated
        self._tokens += new
        self._process.progress += new
        if sampled.policy_version and sampled.policy_version[0] != job.first_version:  # again after an `abort` update
            job.first_version = sampled.policy_version[0]
            first = Version(self.version.epoch, job.first_version)
            self._send(self._backend, FirstToken(job.request.request_id, job.request.session, first))

    def _abort(self, request_id: int) -> None:
        job = self._jobs.get(request_id)
        if job is None:
            return  # the answer is on its way
        if job.started is None:
            self._answer(job, Sampled(finish_reason="abort"))
        else:
            job.aborted = True
            self._spawn(self._engine.abort(request_id))

    def _answer(self, job: _Job, sampled: Sampled, error: str = "") -> None:
        request, now = job.request, time.monotonic()
        del self._jobs[request.request_id]
        started = job.started if job.started is not None else now
        answer = Generated(
            request_id=request.request_id,
            session=request.session,
            columns=sampled.arrays(),
            epoch=request.version.epoch,
            finish_reason=sampled.finish_reason,
            tokens_generated=sampled.tokens_generated,
            generator=self._process.index,
            queued_s=started - job.arrived,
            generate_s=now - started,
            error=error,
        )
        self._send(self._backend, answer)

    # ------------------------------------------------------------ weights

    async def _serve_notices(self) -> None:
        while True:
            notice = await self._receive(self._notices)
            while await self._notices.poll(0):
                notice = await self._receive(self._notices) or notice
            if isinstance(notice, WeightNotice) and notice.version > self.version:
                await self._load(notice)

    async def _load(self, notice: WeightNotice) -> None:
        process = self._process
        deadline_s = process.config.weights.deadline_s
        if process.config.generator.on_update == "drain":
            deadline_s += process.config.generator.drain_deadline_s
        self._loading = process.busy = True
        try:
            async with asyncio.timeout(deadline_s):
                report = await self._engine.load(notice.version, notice.probe_ids)
        except Exception as error:
            what = str(error) or f"not loaded within {deadline_s:.0f} s"
            failed = f"generator {process.index}: weights of version {notice.version.n}: {type(error).__name__}: {what}"
            self._send(self._learner, replace(self._status, error=failed))
            raise RuntimeError(failed) from error
        finally:
            self._loading = False
        self._loads += 1
        self._status = WeightStatus(
            process.index,
            process.incarnation,
            report.version,
            checksum=report.checksum,
            probe_logp=report.probe_logp,
            wait_s=report.wait_s,
            pause_s=report.pause_s,
            copy_s=report.copy_s,
            load_s=report.load_s,
        )
        self._send_status()  # before requests of the new version run, so that the proxy knows of the new cache
        self._release_held()
        self._count()

    # ------------------------------------------------------------ accounting

    async def _report(self) -> None:
        """Heartbeats to proxy and learner. A load counts as progress: it has its own deadline."""
        while True:
            self._send_status()
            self._count()
            self._process.progress += self._loading
            await asyncio.sleep(self._process.config.timeouts.heartbeat_s)

    def _send_status(self) -> None:
        process = self._process
        running = {key: job.tokens for key, job in self._jobs.items() if job.started is not None}
        self._send(self._backend, GeneratorStatus(process.index, process.incarnation, self.version, running))
        self._send(self._learner, self._status)

    def _count(self, running: int = 0) -> None:
        """Close the books on the time until now, then change the number of running requests."""
        process, now = self._process, time.monotonic()
        if self._running:
            self._busy_s += now - self._counted
        else:
            self._idle_s += now - self._counted
        self._counted = now
        self._running += running
        process.busy = self._running > 0 or self._loading
        process.stats = {
            "idle_s": self._idle_s,
            "busy_s": self._busy_s,
            "tokens": self._tokens,
            "running": self._running,
            "held": len(self._jobs) - self._running,
            "version": self.version.n,
            "loads": self._loads,
            "malformed": self._malformed,
        }


async def serve(process: Process, engine: Engine) -> None:
    context = zmq.asyncio.Context()
    try:
        await Generator(process, engine, context).serve()
    finally:
        context.destroy(linger=500)


def main(context: ProcessContext) -> None:
    with Process("generator", context) as process:
        asyncio.run(serve(process, make_engine(context)))


if __name__ == "__main__":
    main(context_from_command_line())

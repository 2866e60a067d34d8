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
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import zmq
from msgspec.structs import replace

from rl.core import messages
from rl.core.messages import Message, ProtocolError, Version
from rl.core.process import Process
from rl.core.receiving import Malformed, Port
from rl.core.run import ProcessContext, context_from_command_line
from rl.core.sockets import identity, open_socket, send
from rollout.generator.engines import make_engine
from rollout.generator.engines.base import Engine, Sampled
from rollout.generator.gate import Gate

NOTHING_LOADED = Version(-1, -1)  # older than any gate


@dataclass(slots=True)
class _Job:
    """A request that has not been answered."""

    request: messages.Generate
    arrived: float = field(default_factory=time.monotonic)
    started: float | None = None  # None: held
    tokens: int = 0  # sampled so far, discarded ones included
    first_version: int | None = None
    aborted: bool = False


class GeneratorServer:
    """Sockets and tasks around an engine; `serve` runs until the supervisor says stop or something fails."""

    def __init__(self, process: Process, engine: Engine, context: zmq.SyncContext) -> None:
        self._process = process
        self._engine = engine
        self._jobs: dict[int, _Job] = {}  # by request id
        self._gate: Gate[int] = Gate()  # request ids; answered ones are dropped lazily
        self._status = messages.WeightStatus(process.index, process.incarnation, NOTHING_LOADED)
        self._notice: messages.WeightNotice | None = None  # the newest
        self._noticed = asyncio.Event()

        self._running = 0
        self._loading = False
        self._loads = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._idle_s = 0.0
        self._counted = time.monotonic()  # until when busy_s and idle_s are counted

        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        me = identity("generator", process.index, process.incarnation)
        connect = partial(open_socket, run=process.run, context=context)
        backend = connect(zmq.DEALER, name="backend", identity=me)
        notices = connect(zmq.PULL, name="notices", index=process.index, bind=True)
        self._malformed = Malformed("generator")
        self._backend = Port(backend, self._from_proxy, self._malformed, self._fail)
        self._notices = Port(notices, self._from_learner, self._malformed, self._fail)
        self._learner = connect(zmq.DEALER, name="weight_status", identity=me)

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
            for socket in (self._backend, self._notices, self._learner):
                socket.close()

    async def _start(self) -> None:
        info = await self._engine.start()
        me = self._process.index, self._process.incarnation
        limits = info.kv_tokens, info.max_num_seqs, info.max_model_len
        self._backend.send(messages.GeneratorHello(*me, *limits, self.version))

        self._spawn(self._follow_notices())
        self._spawn(self._report())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _read_inbox(self) -> None:
        for _ in self._process.received():
            pass  # only Stop concerns a generator, and the process has noted it
        if self._process.stopping and not self._ended.done():
            self._ended.set_result(None)

    # ------------------------------------------------------------ requests

    def _from_proxy(self, message: Message, _peer: bytes) -> None:
        match message:
            case messages.Generate():
                job = self._jobs[message.request_id] = _Job(message)
                if self._gate.admit(message.version, message.request_id, self.version):
                    self._run(job)
            case messages.Abort(request_id):
                self._abort(request_id)
            case _:
                raise ProtocolError(f"{type(message).__name__} from the proxy")

    def _release_held(self) -> None:
        for request_id in self._gate.release(self.version):
            if job := self._jobs.get(request_id):
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
            sampled = Sampled(finish_reason="error", tokens_generated=job.tokens)
            error = str(refused)
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
            self._backend.send(messages.FirstToken(job.request.request_id, job.request.session, first))

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
        request = job.request
        now = time.monotonic()
        started = job.started if job.started is not None else now
        del self._jobs[request.request_id]

        answer = messages.Generated(
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

        self._backend.send(answer)

    # ------------------------------------------------------------ weights

    def _from_learner(self, message: Message, _peer: bytes) -> None:
        if not isinstance(message, messages.WeightNotice):
            raise ProtocolError(f"{type(message).__name__} from the learner")
        self._notice = message
        self._noticed.set()

    async def _follow_notices(self) -> None:
        while True:
            await self._noticed.wait()
            self._noticed.clear()
            assert self._notice is not None
            if self._notice.version > self.version:
                await self._load(self._notice)

    async def _load(self, notice: messages.WeightNotice) -> None:
        process = self._process
        config = process.config
        deadline_s = config.weights.deadline_s
        if config.generator.on_update == "drain":
            deadline_s += config.generator.drain_deadline_s

        self._loading = True
        process.busy = True
        try:
            async with asyncio.timeout(deadline_s):
                status = await self._engine.load(notice.version, notice.probe_ids)
        except Exception as error:
            what = str(error) or f"not loaded within {deadline_s:.0f} s"
            failed = f"generator {process.index}: weights of version {notice.version.n}: {type(error).__name__}: {what}"
            send(self._learner, replace(self._status, error=failed))
            raise RuntimeError(failed) from error
        finally:
            self._loading = False

        self._loads += 1
        self._status = status
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
        self._backend.send(messages.GeneratorStatus(process.index, process.incarnation, self.version, running))
        send(self._learner, self._status)

    def _count(self, running: int = 0) -> None:
        """Close the books on the time until now, then change the number of running requests."""
        process = self._process
        now = time.monotonic()
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
            "malformed": self._malformed.count,
        }


async def serve(process: Process, engine: Engine) -> None:
    context = zmq.Context()  # its own: an engine may hold sockets of the shared one
    try:
        await GeneratorServer(process, engine, context).serve()
    finally:
        context.destroy(linger=500)


def main(context: ProcessContext) -> None:
    with Process("generator", context) as process:
        asyncio.run(serve(process, make_engine(context)))


if __name__ == "__main__":
    main(context_from_command_line())

"""A generator process: one inference engine, its requests, and the weights that arrive while they run.

    python -m rollout.generator.process --run DIR --index I --incarnation K

* A request runs only on weights of its timeline that are not older than its gate (F2); until then it is held here.
* Every request is answered exactly once, an aborted one with what it had generated.
* Weights are loaded one version at a time, always the newest that was announced; versions between are skipped.
  Weights that do not arrive are an error that ends the process, not a slow decline of the reward.
* A failure of the engine ends the process; its requests are then the proxy's to send again.
* With `placement=alternate` it has the device from before the engine starts until the learner asks for it, and from
  the next load on. In between the engine rests, which is no hang.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

import zmq
from msgspec.structs import replace

from rl.config.failures import EngineDied
from rl.observe.trace_events import EngineState, FirstToken, LoadBegan, LoadEnded, SamplingBegan, SamplingEnded
from rl.weights.turns import POLL_S, Turns
from rl.wire import messages
from rl.wire.awake import AwakeLoop
from rl.wire.effort import watched_start
from rl.wire.messages import Message, ProtocolError, Version
from rl.wire.process import Process, leave
from rl.wire.receiving import Malformed, Port
from rl.wire.run import context_from_command_line
from rl.wire.sockets import open_socket, send
from rollout.generator.engines import make_engine
from rollout.generator.engines.base import DRAIN_S, Engine, EngineInfo, Sampled
from rollout.generator.jobs import DELIVERED_EVERY, Gate, Job, Streams

NOTHING_LOADED = Version(-1, -1)  # older than any gate
STATE_S = 0.1  # the trace has the engine's state at most so often
T = TypeVar("T")


class GeneratorServer:
    """Sockets and tasks around an engine; `serve` runs until the supervisor says stop or something fails."""

    def __init__(self, process: Process, engine: Engine, context: zmq.SyncContext) -> None:
        self._process = process
        self._engine = engine
        self._jobs: dict[int, Job] = {}  # by request id
        self._gate: Gate[int] = Gate()  # request ids; answered ones are dropped lazily
        self._status = messages.WeightStatus(process.index, process.incarnation, NOTHING_LOADED)
        self._limits: EngineInfo | None = None  # once it has started
        self._notice: messages.WeightNotice | messages.RestNotice | None = None  # the newest
        self._noticed = asyncio.Event()

        self._running = 0
        self._loading = False
        self._turns = Turns(process.run, alone=False) if process.config.alternates else None
        self._loads = 0
        self._trace = process.trace.add
        self._next_state = 0.0  # when the trace may have the next one
        self._tokens = 0
        self._busy_s = 0.0
        self._counted = time.monotonic()  # until when seconds of work, and without, are counted

        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        self._me = process.run.names.of("generator", process.index, process.incarnation)
        self._connect = partial(open_socket, run=process.run, context=context)
        notices = self._connect(zmq.ROUTER, name="notices", index=process.index, bind=True)
        self._malformed = Malformed("generator")
        self._backend = self._open_backend()
        self._streams = Streams(lambda grown: self._backend.send(grown))
        # With `abort`, an update discards what a client would have read already.
        self._discards = process.config.generator.on_update == "abort"
        self._notices = Port(notices, self._from_learner, self._malformed, self._fail)
        self._learner = self._connect(zmq.DEALER, name="weight_status", identity=self._me)

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

            self._process.busy = True  # an end that does not come is a hang
            self._streams.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

            await self._engine.stop()
            for socket in (self._backend, self._notices, self._learner):
                socket.close()
            if self._turns is not None:
                self._turns.close()

    async def _start(self) -> None:
        if self._turns is not None:
            with self._process.waits.on("learner"):  # which the supervisor watches while it has the device
                while not self._turns.take():
                    await asyncio.sleep(POLL_S)

        with watched_start(self._process):
            self._limits = await self._engine.start()
        self._spawn(self._engine.watch())
        self._greet()

        self._spawn(self._follow_notices())
        self._spawn(self._report())

    def _open_backend(self) -> Port:
        socket = self._connect(zmq.DEALER, name="backend", identity=self._me)
        return Port(socket, self._from_proxy, self._malformed, self._fail, again=self._greet)

    def _greet(self) -> None:
        """Say hello, also after the connection broke: what had been delivered by then may be lost, and is delivered
        again."""
        info = self._limits
        if info is not None:
            for job in self._jobs.values():
                job.delivered = 0
            me = self._process.index, self._process.incarnation
            limits = info.kv_tokens, info.max_num_seqs, info.max_model_len
            self._backend.send(messages.GeneratorHello(*me, *limits, self.version, requests=list(self._jobs)))

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
        for message in self._process.received():
            if isinstance(message, messages.PeerDied) and message.role == "proxy":
                self._meet_new_proxy()
        if self._process.stopping and not self._ended.done():
            self._ended.set_result(None)

    def _meet_new_proxy(self) -> None:
        """Meet it over a new socket: the old one may still send into the dead one's. Clients ask again for what they
        need."""
        self._backend.close(peer_died=True)
        self._backend = self._open_backend()
        self._greet()
        for request_id in list(self._jobs):
            self._abort(request_id)

    # ------------------------------------------------------------ requests

    def _from_proxy(self, message: Message, _peer: bytes) -> None:
        match message:
            case messages.Generate():
                job = self._jobs[message.request_id] = Job(message)
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

    def _run(self, job: Job) -> None:
        """The gate is open: run it, unless its timeline is over."""
        timeline = job.request.version.timeline
        if timeline != self.version.timeline:
            self._answer(
                job, Sampled(finish_reason="error"), f"timeline {timeline} is over; this is {self.version.timeline}"
            )
            return

        job.started = time.monotonic()
        self._trace(SamplingBegan(job.request.session, job.request.request_id, job.started - job.arrived))
        self._count(running=+1)
        self._spawn(self._generate(job))

    async def _generate(self, job: Job) -> None:
        error = ""
        try:
            if job.aborted:  # before the engine has seen it
                sampled = Sampled(finish_reason="abort")
            else:
                sampled = await self._engine.generate(job.request, partial(self._grew, job))
        except ValueError as refused:  # the engine cannot run this request, but others
            sampled = Sampled(finish_reason="error", tokens_generated=job.tokens)
            error = str(refused)
        finally:
            self._count(running=-1)

        self._progress(job, sampled)
        self._answer(job, sampled, error)

    def _grew(self, job: Job, sampled: Sampled) -> None:
        self._progress(job, sampled)
        if job.request.stream and not self._discards:
            self._streams.grew(job)

    def _progress(self, job: Job, sampled: Sampled) -> None:
        new = sampled.tokens_generated - job.tokens
        job.tokens = sampled.tokens_generated
        if sampled is not job.sampled:  # the first, or begun again by an `abort` update
            job.sampled = sampled
            job.delivered = 0
        self._tokens += new
        self._process.progress += new

        if sampled.policy_version and sampled.policy_version[0] != job.first_version:  # again after an `abort` update
            job.first_version = sampled.policy_version[0]
            first = Version(self.version.timeline, job.first_version)
            self._trace(FirstToken(job.request.session, job.request.request_id, job.first_version))
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

    def _answer(self, job: Job, sampled: Sampled, error: str = "") -> None:
        request = job.request
        now = time.monotonic()
        started = job.started if job.started is not None else now
        del self._jobs[request.request_id]
        self._streams.forget(request.request_id)

        answer = messages.Generated(
            request_id=request.request_id,
            session=request.session,
            columns=sampled.arrays(),
            context=sampled.context_arrays(),
            timeline=request.version.timeline,
            finish_reason=sampled.finish_reason,
            tokens_generated=sampled.tokens_generated,
            generator=self._process.index,
            queued_s=started - job.arrived,
            generate_s=now - started,
            error=error,
        )

        if job.started is not None:
            self._trace(SamplingEnded(request.session, request.request_id, job.tokens, sampled.finish_reason))
        self._backend.send(answer)

    # ------------------------------------------------------------ weights

    def _from_learner(self, message: Message, peer: bytes) -> None:
        run = self._process.run
        run.names.sender(peer, "learner")
        match message:
            case messages.RestNotice() if self._turns is not None:
                pass
            case messages.WeightNotice():
                self._check_version(message.version)
            case _:
                raise ProtocolError(f"{type(message).__name__} from the learner")
        self._notice = message
        self._noticed.set()

    def _check_version(self, version: Version) -> None:
        if not 0 <= version.n <= self._process.run.last_step:
            raise ProtocolError(f"WeightNotice of version {version.n}, which this run never has")

    async def _follow_notices(self) -> None:
        while True:
            await self._noticed.wait()
            self._noticed.clear()
            match self._notice:
                case messages.RestNotice() if not self._status.resting:
                    await self._rest()
                case messages.WeightNotice() as notice if self._status.resting or notice.version > self.version:
                    if self._turns is None or self._turns.take():
                        await self._load(notice)
                    else:  # the learner has the device again; it ends this wait, or says something newer
                        await asyncio.sleep(POLL_S)
                        self._noticed.set()

    async def _rest(self) -> None:
        """Leave the device, which the learner waits for."""
        assert self._turns is not None
        self._loading = True
        self._process.busy = True
        self._send_status()
        try:
            await self._while_it_advances(self._engine.rest())
        except TimeoutError as error:
            raise TimeoutError(f"generator {self._process.index} did not come to rest: {error}") from None
        finally:
            self._loading = False

        self._count()
        self._status = replace(self._status, resting=True)
        self._turns.give()
        self._send_status()
        self._count()

    async def _load(self, notice: messages.WeightNotice) -> None:
        process = self._process
        self._loading = True
        process.busy = True
        self._send_status()
        self._trace(LoadBegan(notice.version.timeline, notice.version.n))

        try:
            status = await self._while_it_advances(self._engine.load(notice.version, notice.probe_ids))
        except EngineDied:
            raise  # as `watch` does: whichever of them is first
        except Exception as error:
            where = f"generator {process.index}: weights of version {notice.version.n}"
            failed = f"{where}: {type(error).__name__}: {error}"
            self._trace(LoadEnded(notice.version.timeline, notice.version.n, error=failed))
            send(self._learner, replace(self._status, error=failed))
            raise RuntimeError(failed) from error

        finally:
            self._loading = False

        self._loads += 1
        self._status = status
        self._trace(LoadEnded(status.version.timeline, status.version.n, status.seconds))
        self._send_status()  # before requests of the new version run, so that the proxy knows of the new cache
        self._release_held()
        self._count()

    async def _while_it_advances(self, load: Coroutine[Any, Any, T]) -> T:
        """What the load, or the way to rest, gives.

        Raises TimeoutError once it has stood still for `weights.deadline_s`.
        """
        config = self._process.config
        deadline_s = config.weights.deadline_s + config.timeouts.heartbeat_s  # a reader knows more, and speaks first
        if config.generator.on_update == "drain":
            deadline_s += DRAIN_S

        task = asyncio.create_task(load)
        clock = asyncio.get_running_loop().time
        seen = -1
        since = clock()

        try:
            while not task.done():
                await asyncio.wait({task}, timeout=config.timeouts.heartbeat_s)
                if (loaded := self._engine.loaded()) != seen:
                    seen = loaded
                    since = clock()
                    self._process.progress += 1
                elif clock() - since > deadline_s:
                    raise TimeoutError(f"it has stood still for weights.deadline_s={config.weights.deadline_s:g} s")
            return task.result()

        finally:
            task.cancel()

    # ------------------------------------------------------------ accounting

    async def _report(self) -> None:
        """Heartbeats to proxy and learner."""
        while True:
            self._send_status()
            self._count()
            await asyncio.sleep(self._process.config.timeouts.heartbeat_s)

    def _send_status(self) -> None:
        process = self._process
        running = {key: job.tokens for key, job in self._jobs.items() if job.started is not None}
        grown = {key: new for key, job in self._jobs.items() if (new := job.grown(DELIVERED_EVERY))}
        self._backend.send(messages.GeneratorStatus(process.index, process.incarnation, self.version, running, grown))
        send(self._learner, replace(self._status, loading=self._loading))

    def _count(self, running: int = 0) -> None:
        """Close the books on the time until now, then change the number of running requests."""
        process = self._process
        now = time.monotonic()
        if self._status.resting:
            process.waits.add("learner", now - self._counted)
        elif self._running:
            self._busy_s += now - self._counted
            process.waits.ended()
        else:
            process.waits.add("work", now - self._counted)
        self._counted = now
        self._running += running

        if now >= self._next_state:
            self._next_state = now + STATE_S
            held = len(self._jobs) - self._running
            self._trace(EngineState(self._running, held, self._tokens, self.version.n))

        process.busy = (self._running > 0 and not self._status.resting) or self._loading or self._ended.done()
        process.stats = {
            "idle_s": process.waits.seconds.get("work", 0.0),
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


def main() -> None:
    context = context_from_command_line()
    process = Process("generator", context)
    with process, asyncio.Runner(loop_factory=partial(AwakeLoop, process.tick_s)) as runner:
        runner.run(serve(process, make_engine(context)))
    leave()


if __name__ == "__main__":
    main()

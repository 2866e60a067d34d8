"""Sessions over worker processes. A worker that hangs or dies is replaced, and its sessions are restored by replay.

A worker answers requests in order and says which one it works on. If it hangs, or uses up the CPU time that it allows a
request (SIGPROF), the session of that request is lost, as RequestLost, and no other. If it dies, the session is tried
once more, since the worker may have been killed from outside. For every other session of the worker, the requests that
it remembers are made again in a new process, and its waiting request is sent again. The caller notices only the time.
Answers must depend on a session's requests alone.

A process is there from `start` or from the first request on; one that ends is replaced once there is a session. One
that cannot be started is tried again for as long as the pool is there. After a few times those who wait are told; until
it serves, new sessions go elsewhere.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic

from envs.workers.process import RequestLost, WorkerHung, WorkerKind, WorkerNotStarted, WorkerProcess
from envs.workers.wire import Body, Result, WorkerReply, WorkerRequest

START_TRIES = 3  # before those who wait are told
FIRST_PAUSE_S = 0.2  # between two tries, twice as long each time
LONGEST_PAUSE_S = 30.0


@dataclass(eq=False)
class Session(Generic[Body, Result]):
    """Requests of one user that share a state in a worker. Ends with `end`, or when it is lost."""

    worker: Worker[Body, Result]
    number: int
    remembered: list[Body] = field(default_factory=list)
    deaths: int = 0  # of workers that were working for it

    async def ask(self, body: Body, remember: Callable[[Result], bool] = lambda _: True) -> Result:
        """The worker's answer; `remember` says of it whether the request is made again in a new process.

        Raises RequestLost; RuntimeError before the pool's start and after its stop.
        """
        return await self.worker.ask(self, body, remember)

    def end(self) -> None:
        self.worker.end(self)


class Pool(Generic[Body, Result]):
    """Sessions spread over `workers` processes, each new one where the fewest are and nothing has to start first."""

    def __init__(self, kind: WorkerKind[Result], workers: int) -> None:
        self.workers: list[Worker[Body, Result]] = [Worker(kind) for _ in range(workers)]
        self._opened = 0

    def begin(self) -> None:
        """Take requests from now on; processes start with the first."""
        for worker in self.workers:
            worker.begin()

    async def start(self) -> None:
        """All processes, now. Raises WorkerNotStarted."""
        await asyncio.gather(*(worker.start() for worker in self.workers))

    async def stop(self) -> None:
        """Kill and reap every process."""
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def open(self) -> Session[Body, Result]:
        self._opened += 1
        return min(self.workers, key=lambda worker: (worker.starting, worker.load)).open(self._opened)


@dataclass(slots=True)
class _Pending(Generic[Body, Result]):
    session: Session[Body, Result]
    body: Body | None  # None: the end of the session
    answer: asyncio.Future[Result] | None = None  # None: a replay, or the end
    remember: Callable[[Result], bool] | None = None

    def fail(self, error: RequestLost) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(error)


class Worker(Generic[Body, Result]):
    """One place of the pool: a process at a time, and what it owes. All methods run on the event loop."""

    def __init__(self, kind: WorkerKind[Result]) -> None:
        self.restarts = 0
        self._kind = kind
        self._process: WorkerProcess[Body, Result] | None = None  # while there is one that serves
        self._sessions: dict[int, Session[Body, Result]] = {}
        self._pending: dict[int, _Pending[Body, Result]] = {}  # by number of the request, oldest first
        self._number = 0

        self._needed = asyncio.Event()
        self._settled = asyncio.Event()  # set once the first process serves or has failed to
        self._failed_starts = 0  # since the last process that served
        self._failure: WorkerNotStarted | None = None  # of so many starts that those who waited were told
        self._oldest_since = 0.0  # by the process's clock: when the oldest request became that
        self._alarm: asyncio.TimerHandle | None = None
        self._hung = False
        self._task: asyncio.Task[None] | None = None

    @property
    def load(self) -> int:
        return len(self._sessions)

    @property
    def starting(self) -> bool:
        """A process is wanted, and there is none yet."""
        return self._needed.is_set() and self._process is None

    @property
    def pid(self) -> int | None:
        """The process's id; None while no process serves."""
        return self._process.pid if self._process is not None else None

    def begin(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._kind.name)

    async def start(self) -> None:
        self.begin()
        self._needed.set()
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure

    async def stop(self) -> None:
        task = self._task
        self._task = None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._lose_all(f"{self._kind.name} was stopped")

    def open(self, number: int) -> Session[Body, Result]:
        session = self._sessions[number] = Session(self, number)
        return session

    async def ask(self, session: Session[Body, Result], body: Body, remember: Callable[[Result], bool]) -> Result:
        if self._task is None:
            raise RuntimeError(f"{self._kind.name} was asked while it is not running: `await family.start()` first")
        if session.number not in self._sessions:
            raise RequestLost("its session was lost before")

        answer: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        self._needed.set()
        self._send(_Pending(session, body, answer, remember))
        return await answer

    def end(self, session: Session[Body, Result]) -> None:
        if self._sessions.pop(session.number, None) is not None and self._kind.keeps_state:
            self._send(_Pending(session, None))

    def _send(self, pending: _Pending[Body, Result]) -> None:
        """Send it at once where a process serves; else it waits for the next one."""
        self._number += 1
        self._pending[self._number] = pending
        if self._process is not None:
            self._process.write(WorkerRequest(self._number, pending.session.number, pending.body))
            if len(self._pending) == 1:
                self._watch(self._process)

    def _take(self, reply: WorkerReply[Result]) -> None:
        pending = self._pending.pop(reply.number)
        if self._pending:
            assert self._process is not None
            self._watch(self._process)
        if pending.answer is None:
            return

        if reply.error:
            pending.fail(RequestLost(reply.error))
            return
        result: Result = reply.result  # type: ignore[assignment]  # None only answers the end of a session
        assert pending.body is not None and pending.remember is not None
        if pending.remember(result):
            pending.session.remembered.append(pending.body)
        if not pending.answer.done():
            pending.answer.set_result(result)

    def _watch(self, process: WorkerProcess[Body, Result]) -> None:
        """The deadline runs from when a request became the oldest."""
        self._oldest_since = process.clock()
        if self._alarm is None:
            self._alarm = asyncio.get_running_loop().call_later(self._kind.deadline_s, self._expire)

    def _expire(self) -> None:
        """Set one timer at a time: it asks again when the request that is now the oldest would be due."""
        self._alarm = None
        if not self._pending or self._process is None:
            return

        left_s = self._oldest_since + self._kind.deadline_s - self._process.clock()
        if left_s > 0:
            self._alarm = asyncio.get_running_loop().call_later(left_s, self._expire)
        else:
            self._hung = True
            self._process.kill()

    async def _run(self) -> None:
        """A process whenever one is needed, with the sessions restored in it."""
        while True:
            await self._needed.wait()
            process: WorkerProcess[Body, Result] = WorkerProcess(self._kind, self._take)
            self._hung = False
            failure = None

            try:
                await process.start()
                self._process = process
                self._failed_starts = 0
                self._failure = None
                self._restore()
                self._settled.set()
                await process.ended.wait()
            except WorkerNotStarted as error:
                failure = error

            finally:
                self._process = None
                await process.close()

            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            if failure is not None:
                await self._wait_after(failure)
                continue

            self.restarts += 1
            self._lose(process)
            if not self._sessions:
                self._needed.clear()

    async def _wait_after(self, failure: WorkerNotStarted) -> None:
        """Wait before the next start. Sessions keep their place through the first few failures."""
        self._failed_starts += 1
        if self._failed_starts >= START_TRIES:
            self._failure = failure
            self._lose_all(str(failure))
            self._settled.set()
        pause_s = FIRST_PAUSE_S * 2 ** min(self._failed_starts - 1, 20)
        await asyncio.sleep(min(pause_s, LONGEST_PAUSE_S))

    def _restore(self) -> None:
        """Send every session's remembered requests again, then the one that waits."""
        waiting = {each.session.number: each for each in self._pending.values() if each.answer is not None}
        self._pending.clear()

        for number, session in self._sessions.items():
            for body in session.remembered:
                self._send(_Pending(session, body))
            if number in waiting:
                self._send(waiting[number])

    def _lose(self, process: WorkerProcess[Body, Result]) -> None:
        """The process came to its end over one request: its session is lost, but for a first death."""
        if not self._pending:
            return
        # The process may have ended between two requests: then it is laid to the oldest.
        at = self._pending.get(process.current.get()) or next(iter(self._pending.values()))
        spent = process.exit_code == -signal.SIGPROF
        if not self._hung and not spent:
            at.session.deaths += 1
            if at.session.deaths < 2:
                return

        self._sessions.pop(at.session.number, None)
        why = "used up its CPU time" if spent else "died"
        error = RequestLost(f"{self._kind.name} {why}, asked {at.body}")
        if self._hung:
            error = WorkerHung(f"{self._kind.name} did not answer in {self._kind.deadline_s:g} s, asked {at.body}")
        for each in self._pending.values():
            if each.session is at.session:
                each.fail(error)

    def _lose_all(self, why: str) -> None:
        self._sessions.clear()
        for each in self._pending.values():
            each.fail(WorkerNotStarted(why))
        self._pending.clear()

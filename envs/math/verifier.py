"""Right or wrong, for a response in full: extraction, the fast path, and a pool of processes for symbolic answers.

A worker that hangs is killed and replaced; an answer that hangs a worker, or kills a fresh one too, is wrong
(`unverifiable`): failing the ticket instead would let a model escape its own bad answers by trying again.
Workers start when the first answer needs one. No pickle: JSON lines over pipes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass

import msgspec

from envs.math.answers import Symbolic, judge, last_box

START_DEADLINE_S = 90.0  # importing sympy on a busy machine
_CACHE_SIZE = 8192


class VerifierError(RuntimeError):
    """No worker can be started."""


@dataclass(frozen=True)
class Verdict:
    correct: bool
    boxed: bool  # there was a complete last box
    unverifiable: bool = False  # it hung or crashed the verifier


class _Died(Exception):
    """The worker ended or did not answer in time."""


@dataclass
class _Job:
    line: bytes
    verdict: asyncio.Future[bool | None]  # None: unverifiable


class Verifier:
    def __init__(self, workers: int = 1, deadline_s: float = 5.0) -> None:
        self._count, self._deadline_s = workers, deadline_s
        self._jobs: asyncio.Queue[_Job] = asyncio.Queue()
        self._slots: list[asyncio.Task[None]] = []
        self._processes: dict[int, asyncio.subprocess.Process] = {}  # by slot
        self._cache: OrderedDict[Symbolic, bool | None] = OrderedDict()
        self.symbolic = 0  # answers that needed a worker
        self.restarts = 0

    async def verify(self, gold: str, response: str) -> Verdict:
        """Whether the last box of `response` holds `gold`. Raises VerifierError if no worker can be started."""
        answer = last_box(response)
        if answer is None:
            return Verdict(False, boxed=False)
        question = judge(gold, answer)
        if isinstance(question, bool):
            return Verdict(question, boxed=True)
        if question in self._cache:
            correct = self._cache[question]
        else:
            correct = self._cache[question] = await self._ask(question)
            if len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        return Verdict(bool(correct), boxed=True, unverifiable=correct is None)

    async def stop(self) -> None:
        """Kill and reap every worker."""
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        self._slots.clear()

    def worker_pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    async def _ask(self, question: Symbolic) -> bool | None:
        if not self._slots:
            self._slots = [asyncio.create_task(self._serve(slot)) for slot in range(self._count)]
        self.symbolic += 1
        line = msgspec.json.encode(question) + b"\n"
        job = _Job(line, asyncio.get_running_loop().create_future())
        self._jobs.put_nowait(job)
        return await job.verdict  # bounded by the step deadline of the episode that waits

    async def _serve(self, slot: int) -> None:
        """One worker's life: jobs one after another, a new process whenever the old one has ended."""
        try:
            while True:
                job = await self._jobs.get()
                if job.verdict.done():  # its episode was cancelled meanwhile
                    continue
                try:
                    correct = await self._attempt(slot, job.line)
                except VerifierError as error:
                    if not job.verdict.done():
                        job.verdict.set_exception(error)
                    continue
                if not job.verdict.done():
                    job.verdict.set_result(correct)
        finally:
            await self._kill(slot)

    async def _attempt(self, slot: int, line: bytes) -> bool | None:
        """The worker's answer. A worker that died is replaced and asked once more; one that hung is not."""
        for _ in range(2):
            process = self._processes.get(slot)
            if process is None or process.returncode is not None:
                process = await self._start(slot)
            try:
                return await self._exchange(process, line, self._deadline_s) == b"true\n"
            except TimeoutError:
                self.restarts += 1
                await self._kill(slot)
                return None
            except _Died:
                self.restarts += 1
                await self._kill(slot)
        return None

    async def _start(self, slot: int) -> asyncio.subprocess.Process:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "envs.math.worker",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
                env=os.environ | {"FRESCO_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        except OSError as error:
            raise VerifierError(f"a maths verifier cannot be started: {error}") from error
        self._processes[slot] = process
        try:
            first = await self._exchange(process, b"", START_DEADLINE_S)
        except (TimeoutError, _Died) as error:
            await self._kill(slot)
            raise VerifierError(f"a maths verifier did not start: {error or 'deadline'}") from error
        if first != b'"ready"\n':
            await self._kill(slot)
            raise VerifierError(f"a maths verifier began with {first[:80]!r}")
        return process

    async def _exchange(self, process: asyncio.subprocess.Process, line: bytes, deadline_s: float) -> bytes:
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(line)
            async with asyncio.timeout(deadline_s):
                answer = await process.stdout.readline()
        except (ConnectionError, ValueError) as error:
            raise _Died(str(error)) from error
        if not answer.endswith(b"\n"):
            raise _Died("its process ended")
        return answer

    async def _kill(self, slot: int) -> None:
        process = self._processes.pop(slot, None)
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

"""Pools of worker processes: who loses what when one hangs, dies or cannot be started."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from envs.workers import process
from envs.workers.pool import START_TRIES, Pool, Worker
from envs.workers.process import RequestLost, WorkerHung, WorkerKind, WorkerNotStarted
from envs.workers.wire import FrameReader, WorkerRequest, frame

pytestmark = pytest.mark.slow

Words = Pool[str, list[str]]


def run(
    scenario: Callable[[Words], Awaitable[None]], workers: int = 1, deadline_s: float = 120.0, *arguments: str
) -> None:
    async def within() -> None:
        kind = WorkerKind("a word worker", "tests.envs.adding_worker", list[str], deadline_s, arguments)
        pool = Words(kind, workers)
        before = _children()
        try:
            await scenario(pool)
        finally:
            await pool.stop()
        assert _children() == before, "the pool left a process, or one that nobody has waited for"

    asyncio.run(within())


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def pid_of(worker: Worker[str, list[str]]) -> int:
    """Of its process, once one serves."""
    while worker.pid is None:
        await asyncio.sleep(0.01)
    return worker.pid


def test_processes_start_with_the_first_request_and_sessions_spread() -> None:
    async def scenario(pool: Words) -> None:
        session = pool.open()
        with pytest.raises(RuntimeError, match="a word worker was asked while it is not running"):
            await session.ask("early")
        session.end()

        pool.begin()
        await asyncio.sleep(0.1)
        assert [worker.pid for worker in pool.workers] == [None, None]
        sessions = [pool.open() for _ in range(4)]
        assert [worker.load for worker in pool.workers] == [2, 2]
        answers = await asyncio.gather(*(each.ask(f"word {each.number}") for each in sessions))
        assert answers == [[f"word {each.number}"] for each in sessions]

        for each in sessions:
            each.end()
        assert [worker.load for worker in pool.workers] == [0, 0]
        with pytest.raises(RequestLost, match="lost before"):
            await sessions[0].ask("late")

    run(scenario, workers=2)


def test_a_hang_costs_one_session_and_the_others_only_time() -> None:
    async def scenario(pool: Words) -> None:
        await pool.start()
        (worker,) = pool.workers
        idle, waiting, hanging = (pool.open() for _ in range(3))
        await idle.ask("a")
        await waiting.ask("b")

        asked = [asyncio.ensure_future(hanging.ask("hang")), asyncio.ensure_future(waiting.ask("c"))]
        with pytest.raises(WorkerHung, match="a word worker did not answer in 5 s, asked hang"):
            await asked[0]
        assert await asked[1] == ["b", "c"]
        assert await idle.ask("d") == ["a", "d"]
        assert worker.restarts == 1 and worker.load == 2

    run(scenario, deadline_s=5.0)


def test_a_request_that_computes_for_ever_is_a_hang_too() -> None:
    async def scenario(pool: Words) -> None:
        await pool.start()
        with pytest.raises(WorkerHung, match="a word worker did not answer in 2 s, asked spin"):
            await pool.open().ask("spin")

    run(scenario, deadline_s=2.0)


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="this kernel does not count how long a process waits for a core"
)
def test_a_worker_that_is_kept_from_its_core_is_no_hang() -> None:
    """Beside one busy process of ten times its weight, on one core: 4.5 s by the clock, of which it has a tenth."""

    async def scenario(pool: Words) -> None:
        await pool.start()
        (worker,) = pool.workers
        pid = await pid_of(worker)
        core = {min(os.sched_getaffinity(0))}
        os.sched_setaffinity(pid, core)
        os.setpriority(os.PRIO_PROCESS, pid, os.getpriority(os.PRIO_PROCESS, 0) + 10)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])

        try:
            os.sched_setaffinity(busy.pid, core)
            assert await pool.open().ask("spin for 4.5 s") == ["spin for 4.5 s"]
        finally:
            busy.kill()
            busy.wait()
        assert worker.restarts == 0

    run(scenario, deadline_s=3.0)


def test_a_start_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "START_DEADLINE_S", 0.001)

    async def scenario(pool: Words) -> None:
        with pytest.raises(WorkerNotStarted, match=r"a word worker did not start in 0\.001 s"):
            await pool.start()

    run(scenario)


def test_a_killed_worker_costs_nothing_but_a_session_that_kills_twice_is_lost() -> None:
    async def scenario(pool: Words) -> None:
        await pool.start()
        (worker,) = pool.workers
        first = pool.open()
        second = pool.open()
        await first.ask("a")
        os.kill(await pid_of(worker), signal.SIGKILL)
        assert await first.ask("b") == ["a", "b"] and worker.restarts == 1

        deadly = asyncio.ensure_future(second.ask("die"))
        assert await first.ask("c") == ["a", "b", "c"]
        with pytest.raises(RequestLost, match="a word worker died, asked die"):
            await deadly
        assert worker.restarts == 3 and worker.load == 1

    run(scenario)


def test_what_need_not_be_remembered_is_not_asked_again_and_a_refusal_neither() -> None:
    async def scenario(pool: Words) -> None:
        pool.begin()
        (worker,) = pool.workers
        session = pool.open()
        await session.ask("kept")
        await session.ask("dropped", remember=lambda words: words[-1] != "dropped")
        with pytest.raises(RequestLost, match="ValueError: not this word"):
            await session.ask("refuse")
        assert await session.ask("last") == ["kept", "dropped", "last"]

        os.kill(await pid_of(worker), signal.SIGKILL)
        assert await session.ask("more") == ["kept", "last", "more"]

    run(scenario)


def test_an_idle_process_that_dies_is_replaced_when_it_is_needed() -> None:
    async def scenario(pool: Words) -> None:
        await pool.start()
        (worker,) = pool.workers
        before = await pid_of(worker)
        os.kill(before, signal.SIGKILL)
        while worker.pid is not None:
            await asyncio.sleep(0.01)

        session = pool.open()
        (after,) = await session.ask("pid")
        assert int(after) == worker.pid != before

    run(scenario)


def failing(folder: Path, times: int) -> str:
    """The argument of a worker whose next starts fail, so many of them."""
    for number in range(times):
        (folder / f"{folder.name}-{number}").touch()
    return str(folder)


def test_a_worker_that_cannot_start_fails_requests_and_the_start(tmp_path: Path) -> None:
    async def scenario(pool: Words) -> None:
        with pytest.raises(WorkerNotStarted, match="a word worker did not start in 120 s, or ended before it served"):
            await pool.start()
        with pytest.raises(WorkerNotStarted):
            await pool.open().ask("a")
        assert pool.workers[0].load == 0

    run(scenario, 1, 120.0, failing(tmp_path, 1000))


def test_the_first_starts_die_and_nobody_notices(tmp_path: Path) -> None:
    async def scenario(pool: Words) -> None:
        pool.begin()
        sessions = [pool.open() for _ in range(4)]
        answers = await asyncio.gather(*(each.ask(f"word {each.number}") for each in sessions))
        assert answers == [[f"word {each.number}"] for each in sessions]
        assert not list(tmp_path.iterdir()) and pool.workers[0].load == 4

    run(scenario, 1, 120.0, failing(tmp_path, START_TRIES - 1))


def test_a_worker_that_dies_at_every_start_swallows_no_new_session_and_is_used_once_it_serves(tmp_path: Path) -> None:
    async def scenario(pool: Words) -> None:
        await pool.start()
        broken, sound = pool.workers
        first = pool.open()
        assert first.worker is broken
        await first.ask("a")

        failing(tmp_path, START_TRIES + 1)
        os.kill(await pid_of(broken), signal.SIGKILL)
        while not broken.starting:
            await asyncio.sleep(0.01)
        with pytest.raises(WorkerNotStarted):
            await first.ask("b")
        assert broken.load == 0 and broken.starting, "the emptiest worker, and none that serves"

        for _ in range(20):
            session = pool.open()
            assert await session.ask("c") == ["c"] and session.worker is sound
            session.end()
        await pid_of(broken)  # its starts were tried without anybody asking, until one did not fail
        assert not list(tmp_path.iterdir()) and pool.open().worker is broken

    run(scenario, 2, 120.0, str(tmp_path))


def test_a_worker_that_used_up_its_cpu_time_is_not_asked_again() -> None:
    async def scenario(pool: Words) -> None:
        await pool.start()
        other = pool.open()
        await other.ask("a")
        with pytest.raises(RequestLost, match="a word worker used up its CPU time, asked spend"):
            await pool.open().ask("spend")
        assert await other.ask("b") == ["a", "b"] and pool.workers[0].restarts == 1

    run(scenario)


def test_stopping_ends_the_wait_of_whoever_still_waits() -> None:
    async def scenario(pool: Words) -> None:
        pool.begin()
        waiting = asyncio.ensure_future(pool.open().ask("hang"))
        await pid_of(pool.workers[0])
        await pool.stop()
        with pytest.raises(RequestLost, match="a word worker was stopped"):
            await waiting

    run(scenario)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_frames_are_read_however_a_pipe_cuts_them(size: int) -> None:
    sent = [WorkerRequest(number, 7, "x" * number) for number in range(40)]
    stream = b"".join(map(frame, sent))
    reader = FrameReader(WorkerRequest[str])
    chunks = (stream[begin : begin + size] for begin in range(0, len(stream), size))
    assert [message for chunk in chunks for message in reader.feed(chunk)] == sent


def test_the_exit_code_of_a_process_that_died_before_it_was_killed_is_its_own() -> None:
    """A kill that reaps the dead one would leave asyncio with no exit code, and a spent worker was tried again."""

    async def scenario(pool: Words) -> None:
        await pool.start()
        for _ in range(10):
            with pytest.raises(RequestLost, match="used up its CPU time"):
                await pool.open().ask("spend")
        assert pool.workers[0].restarts == 10

    run(scenario)

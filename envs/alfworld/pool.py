"""Live games over worker processes. A worker that hangs or dies is replaced, and its games are restored by replay.

A worker says which request it works on. If it hangs, that game fails, as GameLost, and no other; if it dies, the game
is tried once more, since the worker may have been killed from outside.
Every other game of the worker is loaded anew, its commands are played again, and its waiting request is sent again; the
caller notices only the time. Replay is exact: the engine is deterministic.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from envs.alfworld.wire import CHUNK, Inbox, Position, Reply, Request, frame

START_DEADLINE_S = 120.0  # importing the engine on a busy machine


class GameLost(RuntimeError):
    """This game's worker hung, died or refused the game; the message says which."""


@dataclass
class _Episode:
    path: str
    played: list[str] = field(default_factory=list)
    deaths: int = 0  # of workers that were playing this game


@dataclass(slots=True)
class _Pending:
    request: Request
    answer: asyncio.Future[Reply] | None  # None: a replay, or the end of an episode


class Worker:
    """One process and what it owes. All methods run on the event loop."""

    def __init__(self, boards_kept: int, deadline_s: float, lists_commands: bool) -> None:
        self._given = (str(boards_kept), *(["commands"] if lists_commands else []))
        self._deadline_s = deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._episodes: dict[int, _Episode] = {}
        self._pending: OrderedDict[int, _Pending] = OrderedDict()
        self._seq = 0
        self._serving = False  # while a process is being replaced, requests wait in `_pending`
        self._replies = -1  # the descriptor that replies arrive on, while it is open
        self._inbox = Inbox(Reply)
        self._position: Position
        self._begun: asyncio.Future[bool]  # whether a new process came up
        self._ended = asyncio.Event()  # set when one that had come up has closed its end
        self._oldest_since = 0.0  # loop time at which the oldest request became that
        self._alarm: asyncio.TimerHandle | None = None
        self._hung = False
        self._task: asyncio.Task[None] | None = None
        self.restarts = 0

    @property
    def load(self) -> int:
        return len(self._episodes)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Raises GameLost if the process does not come up."""
        await self._spawn()
        self._task = asyncio.create_task(self._serve(), name="alfworld worker")

    async def ask(self, op: Literal["load", "step"], episode: int, argument: str) -> Reply:
        """Raises GameLost; RuntimeError before `start` and after `stop`."""
        if self._task is None:
            raise RuntimeError("a game worker was asked while it is not running: `await family.start()` comes first")
        if op == "load":
            self._episodes[episode] = _Episode(argument)
        elif episode not in self._episodes:
            raise GameLost("the game was lost before")
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._send(op, episode, argument, answer)
        reply = await answer
        if reply.error:
            raise GameLost(reply.error)
        return reply

    def end(self, episode: int) -> None:
        if self._episodes.pop(episode, None) is not None:
            self._send("end", episode, "", None)

    async def stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self._kill()

    def _send(
        self, op: Literal["load", "step", "end"], episode: int, argument: str, answer: asyncio.Future[Reply] | None
    ) -> None:
        self._seq += 1
        request = Request(self._seq, op, episode, argument)
        self._pending[request.seq] = _Pending(request, answer)
        if self._serving and self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(frame(request))
            if len(self._pending) == 1:
                self._watch()

    def _watch(self) -> None:
        """The deadline runs from when a request became the oldest; past it the process is killed."""
        loop = asyncio.get_running_loop()
        self._oldest_since = loop.time()
        if self._alarm is None:
            self._alarm = loop.call_later(self._deadline_s, self._expire)

    def _expire(self) -> None:
        """One timer at a time: it asks again when the request that is now the oldest would be due."""
        self._alarm = None
        if not self._pending:
            return
        loop = asyncio.get_running_loop()
        due = self._oldest_since + self._deadline_s
        if loop.time() < due:
            self._alarm = loop.call_at(due, self._expire)
            return
        self._hung = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _serve(self) -> None:
        """Whenever the process hangs or dies, replace it."""
        try:
            while True:
                await self._ended.wait()
                if self._hung:
                    await self._replace(f"a game worker did not answer in {self._deadline_s:g} s")
                else:
                    await self._replace("a game worker died", died=True)
        except GameLost as error:
            self._give_up(str(error))

    def _readable(self) -> None:
        """Called by the event loop: no task and no stream between the pipe and whoever waits."""
        chunk = os.read(self._replies, CHUNK)
        for reply in self._inbox.feed(chunk):
            self._take(reply)
        if chunk:
            return
        self._close_replies()
        if self._begun.done():
            self._ended.set()
        else:
            self._begun.set_result(False)

    def _take(self, reply: Reply) -> None:
        if reply.seq == 0:
            self._begun.set_result(True)
            return
        pending = self._pending.pop(reply.seq)
        if self._pending:
            self._watch()
        episode = self._episodes.get(pending.request.episode)
        if episode is not None and pending.request.op == "step" and reply.admissible and pending.answer is not None:
            episode.played.append(pending.request.argument)
        if pending.answer is not None and not pending.answer.done():
            pending.answer.set_result(reply)

    async def _replace(self, why: str, died: bool = False) -> None:
        """Fail the game that was being played, and restore the others in a new process. Raises GameLost."""
        self.restarts += 1
        self._serving = False
        await self._kill()
        if self._pending:
            at = self._pending.get(self._position.get())  # None: it came to an end between two requests
            self._blame((at or next(iter(self._pending.values()))).request, why, died)
        await self._spawn()
        waiting = {each.request.episode: each for each in self._pending.values() if each.answer is not None}
        self._pending.clear()
        for number, episode in self._episodes.items():
            again = waiting.get(number)
            if again is None or again.request.op == "step":
                self._send("load", number, episode.path, None)
                for command in episode.played:
                    self._send("step", number, command, None)
            if again is not None:
                self._send(again.request.op, number, again.request.argument, again.answer)

    def _blame(self, at: Request, why: str, died: bool) -> None:
        """The worker was at this request: its game is lost, unless a first death may have had another cause."""
        episode = self._episodes.get(at.episode)
        if episode is None:
            return
        episode.deaths += died
        if died and episode.deaths < 2:
            return
        del self._episodes[at.episode]
        for each in self._pending.values():
            if each.request.episode == at.episode and each.answer is not None and not each.answer.done():
                each.answer.set_exception(GameLost(f"{why}, playing {at.argument!r}"))

    def _give_up(self, why: str) -> None:
        self._episodes.clear()
        for each in self._pending.values():
            if each.answer is not None and not each.answer.done():
                each.answer.set_exception(GameLost(why))
        self._pending.clear()

    async def _spawn(self) -> None:
        environment = os.environ | {
            "FRESCO_PARENT_PID": str(os.getpid()), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        self._replies, theirs = os.pipe()
        self._inbox, self._position = Inbox(Reply), Position()
        page = self._position.descriptor
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "envs.alfworld.worker", str(page), *self._given,
                stdin=asyncio.subprocess.PIPE, stdout=theirs, pass_fds=(page,), env=environment,
            )  # fmt: skip
        except OSError as error:
            self._close_replies()
            raise GameLost(f"a game worker cannot be started: {error}") from error
        finally:
            os.close(theirs)
            self._position.close_descriptor()
        self._ended.clear()
        self._begun = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._replies, self._readable)
        begun = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(START_DEADLINE_S):
                begun = await self._begun
        if not begun:
            await self._kill()
            raise GameLost(f"a game worker did not start in {START_DEADLINE_S:g} s, or ended before it served")
        self._serving = True

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._hung = None, False
        self._close_replies()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def _close_replies(self) -> None:
        if self._replies >= 0:
            asyncio.get_running_loop().remove_reader(self._replies)
            os.close(self._replies)
        self._replies = -1


class Pool:
    """Games spread over `workers` processes, each new one where the fewest live."""

    def __init__(self, workers: int, boards_kept: int, deadline_s: float, *, lists_commands: bool) -> None:
        self.workers = [Worker(boards_kept, deadline_s, lists_commands) for _ in range(workers)]
        self._next = 0

    async def start(self) -> None:
        await asyncio.gather(*(worker.start() for worker in self.workers))

    async def stop(self) -> None:
        await asyncio.gather(*(worker.stop() for worker in self.workers))

    def place(self) -> tuple[Worker, int]:
        """Where the next episode plays, and its number."""
        self._next += 1
        return min(self.workers, key=lambda worker: worker.load), self._next

    async def load(self, path: Path) -> tuple[LiveGame, Reply]:
        """Begin a game. Raises GameLost."""
        worker, number = self.place()
        game = LiveGame(worker, number)
        try:
            return game, await worker.ask("load", number, str(path))
        except BaseException:
            game.end()
            raise


@dataclass(frozen=True)
class LiveGame:
    worker: Worker
    number: int

    async def step(self, command: str) -> Reply:
        """Raises GameLost."""
        return await self.worker.ask("step", self.number, command)

    def end(self) -> None:
        self.worker.end(self.number)

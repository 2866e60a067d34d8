"""The environment server: many episodes at once in one asyncio loop (`python -m envs.server --run DIR --index I`).

Invariants: every ticket ends exactly once, as Trajectory, TicketFailed or TicketCancelled, which share one increasing
sequence number; a trajectory is kept, and sent again every few seconds under its number, until it is acknowledged;
TicketCancelled leaves only after the episode's generation has ended and its environment is closed; nothing that an
environment does ends more than its own ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import dataclass

import zmq
from msgspec.structs import replace

from envs.registry import make_family
from rl.core.messages import (
    AckTickets,
    CancelTickets,
    ClientHello,
    Generated,
    Message,
    ProtocolError,
    ServerHello,
    Stop,
    Ticket,
    TicketCancelled,
    TicketFailed,
    Trajectory,
)
from rl.core.process import Process, WaitExpired
from rl.core.receiving import Port, fatal
from rl.core.run import ProcessContext, context_from_command_line
from rl.core.sockets import identity, open_socket, send
from rollout.episodes.environment import EnvironmentFamily
from rollout.episodes.episode import EpisodeContext, EpisodeFailed, Progress, run_episode
from rollout.episodes.generation import GenerationClient
from rollout.episodes.tokenizer import TokenizerError, load_tokenizer
from rollout.episodes.turn_barrier import TurnBarrier

RESEND_S = 3.0  # a trajectory not acknowledged within this is sent again
TICK_S = 0.1
STOP_S = 4.0  # for episodes and workers to end; within timeouts.stop_s of the supervisor
JOIN_S = 0.05  # `rollout.turn_barrier`: for the tickets of one round, sent together, to arrive
REASON_CHARS = 500  # of a failure, on the wire
CANCELLED = "cancelled"


@dataclass
class RunningEpisode:
    """`ending` says why it was told to end: cancelled by the broker, or what deadline it passed."""

    ticket: Ticket
    task: asyncio.Task[Trajectory]
    timer: asyncio.TimerHandle
    progress: Progress
    ending: str = ""


class EnvServer:
    """Call `run()` once, on the loop that created it."""

    def __init__(self, process: Process, family: EnvironmentFamily) -> None:
        self.process = process
        self.config = process.config
        self.family = family
        self._me = {"server": process.index, "incarnation": process.incarnation}
        self._seq = 0
        self._episodes: dict[int, RunningEpisode] = {}
        self._unacknowledged: dict[int, tuple[Trajectory, float]] = {}  # by ticket: result, time to send it again
        self._counts = Counter(episodes_done=0, episodes_failed=0, episodes_cancelled=0, trajectories_resent=0)
        self._wake = asyncio.Event()
        self._fatal: Exception | None = None
        self._stopped = False

        run = process.run
        me = identity("env_server", process.index, process.incarnation)
        tickets, frontend = (open_socket(zmq.DEALER, run, name, identity=me) for name in ("tickets", "frontend"))
        self._tickets = Port(tickets, self._from_broker, fatal, self._fail)
        self._frontend = Port(frontend, self._from_proxy, fatal, self._fail)
        self._trajectories = open_socket(zmq.PUSH, run, "trajectories")

        # The proxy answers an abort at once, unless the generator hangs: then when the supervisor has fenced it.
        self._client = GenerationClient(self._frontend.send, abort_deadline_s=self.config.timeouts.hang_s + 30)
        barrier = _turn_barrier() if self.config.rollout.turn_barrier else None
        self._context = EpisodeContext(
            self.config, load_tokenizer(run.model_folder), self._client.generate, barrier=barrier
        )

    async def run(self) -> None:
        """Serve until the supervisor says stop. Raises what the server cannot go on after."""
        asyncio.get_running_loop().add_reader(self.process.wake_fd, self._wake.set)
        start_s = self.config.timeouts.start_s
        try:
            async with asyncio.timeout(start_s):
                await self.family.start()
        except TimeoutError:
            raise WaitExpired(f"environment {self.config.env.name!r} did not start in {start_s:.0f} s") from None

        try:
            self._frontend.send(ClientHello(**self._me))
            self._tickets.send(ServerHello(capacity=self.config.env.episodes_per_server, **self._me))
            await self._serve()
        finally:
            await self._stop()

    async def _serve(self) -> None:
        previous = time.monotonic()
        while not self.process.stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            self._wake.clear()

            if any(isinstance(message, Stop) for message in self.process.received()):
                return
            if self._fatal is not None:
                raise self._fatal

            now = time.monotonic()
            self._tick(now, now - previous)
            previous = now

    def _tick(self, now: float, elapsed_s: float) -> None:
        process = self.process
        activity = self._context.activity
        process.progress += 1
        process.busy = bool(self._episodes)
        if not self._episodes:
            process.waits.add("broker", elapsed_s)
        elif not activity.running["environment"] and activity.running["generate"]:
            process.waits.add("proxy", elapsed_s)

        process.stats = {
            "episodes_running": len(self._episodes),
            "env_s": activity.seconds["environment"],
            "generate_wait_s": activity.seconds["generate"],
            "close_failures": activity.close_failures,
            "unacknowledged": len(self._unacknowledged),
            **self._counts,
        }

        for ticket_id, (trajectory, due) in list(self._unacknowledged.items()):
            if now >= due:
                self._counts["trajectories_resent"] += 1
                self._send_trajectory(ticket_id, trajectory)

    def _from_broker(self, message: Message, _peer: bytes) -> None:
        match message:
            case Ticket():
                self._begin(message)
            case CancelTickets(ticket_ids):
                for ticket_id in ticket_ids:
                    self._end(ticket_id, CANCELLED)
            case AckTickets(ticket_ids):
                for ticket_id in ticket_ids:
                    self._unacknowledged.pop(ticket_id, None)
            case _:
                raise ProtocolError(f"the broker sent {type(message).__name__} to an environment server")

    def _from_proxy(self, message: Message, _peer: bytes) -> None:
        if not isinstance(message, Generated):
            raise ProtocolError(f"the proxy sent {type(message).__name__} to an environment server")
        self._client.answered(message)

    def _begin(self, ticket: Ticket) -> None:
        ticket_id = ticket.ticket_id
        if ticket_id in self._episodes or ticket_id in self._unacknowledged:
            raise ProtocolError(f"ticket {ticket_id} was issued twice")

        loop = asyncio.get_running_loop()
        progress = Progress()
        episode = self._episode(ticket, progress)
        task = loop.create_task(episode, name=f"ticket {ticket_id}")
        overran = f"the episode ran past its deadline of {ticket.deadline_s:g} s"
        timer = loop.call_later(ticket.deadline_s, self._end, ticket_id, overran)
        self._episodes[ticket_id] = RunningEpisode(ticket, task, timer, progress)
        task.add_done_callback(lambda _: self._ended(ticket_id))

    async def _episode(self, ticket: Ticket, progress: Progress) -> Trajectory:
        task = self.family.task("eval" if ticket.kind == "eval" else "train", ticket.task_index)
        return await run_episode(ticket, self.family.make, task, self._context, progress)

    def _end(self, ticket_id: int, why: str) -> None:
        """Tell an episode to end, once; one that has ended already keeps its result."""
        running = self._episodes.get(ticket_id)
        if running is not None and not running.ending:
            running.ending = why
            running.task.cancel()

    def _ended(self, ticket_id: int) -> None:
        """The one place where a ticket ends."""
        running = self._episodes.pop(ticket_id)
        running.timer.cancel()
        if self._stopped:
            return
        try:
            self._report(running)
        except Exception as error:  # a result that cannot be sent: nothing that comes later may overtake it
            self._fail(error)

    def _report(self, running: RunningEpisode) -> None:
        task = running.task
        error = None if task.cancelled() else task.exception()
        if isinstance(error, WaitExpired):
            self._fail(error)
            return

        self._seq += 1
        ticket_id = running.ticket.ticket_id
        end = {"seq": self._seq, "ticket_id": ticket_id, "turns": running.progress.turns, **self._me}

        if task.cancelled() and running.ending == CANCELLED:
            self._counts["episodes_cancelled"] += 1
            self._tickets.send(TicketCancelled(**end))
        elif task.cancelled() or error is not None:
            self._counts["episodes_failed"] += 1
            reason = running.ending if error is None else _described(error)
            self._tickets.send(TicketFailed(reason=reason[:REASON_CHARS], **end))
        else:
            self._counts["episodes_done"] += 1
            self._send_trajectory(ticket_id, replace(task.result(), seq=self._seq, **self._me))

    def _send_trajectory(self, ticket_id: int, trajectory: Trajectory) -> None:
        self._unacknowledged[ticket_id] = (trajectory, time.monotonic() + RESEND_S)
        send(self._trajectories, trajectory)

    def _fail(self, error: Exception) -> None:
        """The server itself cannot go on: `run` raises this."""
        if self._fatal is None:
            self._fatal = error
        self._wake.set()

    async def _stop(self) -> None:
        """End every episode and the family's workers, within STOP_S each."""
        self._stopped = True
        self._client.close()

        tasks = [running.task for running in self._episodes.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, pending = await asyncio.wait(tasks, timeout=STOP_S)
            for task in pending:
                print(f"{task.get_name()} did not end in {STOP_S:g} s", file=sys.stderr)

        try:
            async with asyncio.timeout(STOP_S):
                await self.family.stop()
        except TimeoutError:
            print(f"environment {self.config.env.name!r} did not stop in {STOP_S:g} s", file=sys.stderr)

        for socket in (self._tickets, self._frontend, self._trajectories):
            socket.close()


def _turn_barrier() -> TurnBarrier[int]:
    loop = asyncio.get_running_loop()
    return TurnBarrier(loop.call_soon, lambda release: loop.call_later(JOIN_S, release))


def _described(error: BaseException) -> str:
    """One line for the broker; what is no plain failure leaves its traceback in this process's log."""
    if isinstance(error, EpisodeFailed | TokenizerError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}"


async def serve(process: Process) -> None:
    await EnvServer(process, make_family(process.config)).run()


def main(context: ProcessContext) -> None:
    with Process("env_server", context) as process:
        asyncio.new_event_loop().run_until_complete(serve(process))
    zmq.Context.instance().term()  # what was sent last leaves, within the sockets' linger
    sys.stdout.flush()
    os._exit(0)  # abandoned calls and threads of an environment must not keep the process alive


if __name__ == "__main__":
    main(context_from_command_line())

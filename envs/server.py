"""The environment server: many episodes at once in one asyncio loop (`python -m envs.server --run DIR --index I`).

Invariants:

* every ticket ends exactly once, as Trajectory, TicketFailed or TicketCancelled, which share one increasing sequence
  number;
* each of these is kept, and sent again every few seconds under its number, until it is acknowledged;
* TicketCancelled leaves only after the episode's generation has ended and its environment is closed;
* nothing that an environment does ends more than its own ticket.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import zmq
from msgspec.structs import replace

from envs.audit.auditor import ANSWERS, Auditor
from envs.data import check_data
from envs.guards import check_template
from envs.held_out import check_held_out, knows_tasks
from envs.registry import make_family
from rl.config.hooks import make_hooks
from rl.config.schema import Config, ConfigError
from rl.observe.trace_events import EpisodeEnded
from rl.store.samples import SampleFile
from rl.wire import messages
from rl.wire.awake import AwakeLoop
from rl.wire.messages import Message, ProtocolError, Ticket, Trajectory
from rl.wire.process import Process, WaitExpired, leave
from rl.wire.receiving import Handler, Malformed, Outgoing, Port
from rl.wire.run import context_from_command_line
from rl.wire.sockets import open_socket
from rl.wire.text import whole
from rollout.episodes.environment import EnvironmentFamily
from rollout.episodes.episode import EpisodeContext, Progress, run_episode
from rollout.episodes.foreign import ForeignContext
from rollout.episodes.generation import GenerationClient
from rollout.episodes.hooks import EpisodeHooks
from rollout.episodes.tokenizer import TokenizerError, load_tokenizer
from rollout.episodes.turns import EpisodeFailed
from rollout.parsers.client import ParserClient, open_reader
from rollout.teacher.client import TeacherClient

if TYPE_CHECKING:
    from envs.gateway.server import Gateway
    from rl.wire.run import RunFile

End = Trajectory | messages.TicketFailed | messages.TicketCancelled
RESEND_S = 3.0  # an end not acknowledged within this is sent again
STOP_S = 4.0  # for episodes and workers to end; within timeouts.stop_s of the supervisor
JOIN_S = 0.05  # hooks: for tickets that were sent together to arrive
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
        self._unacknowledged: dict[int, tuple[End, float]] = {}  # by ticket: its end, time to send it again
        self._counts = Counter(episodes_done=0, episodes_failed=0, episodes_cancelled=0, resent=0)
        self._wake = asyncio.Event()
        self._fatal: Exception | None = None
        self._stopped = False

        run = process.run
        me = f"env_server.{process.index}.{process.incarnation}"
        self._auditor = Auditor(family, -(-ANSWERS // process.config.env.servers), process.alarms)
        self._samples = SampleFile(run.folder, me, self.config.tracking.samples)
        self._malformed = Malformed("env_server")
        self._tickets = self._open_tickets()
        self._frontend = self._open_frontend()
        self._trajectories = Outgoing(self._connect("trajectories"), self._fail)

        # The proxy answers an abort at once, unless the generator hangs: then when the supervisor has fenced it.
        self._client = GenerationClient(self._ask, abort_deadline_s=self.config.timeouts.hang_s + 30)

        tokenizer = load_tokenizer(run.model_folder, self.config.chat.template_options)
        foreign = getattr(family, "foreign", False)
        self._gateway = gateway = _gateway(run) if foreign else None
        needed = foreign or getattr(family, "tools", False)
        reader = open_reader(process, tokenizer, self._malformed, self._fail) if needed else None
        self._parsers = reader.parser if reader and isinstance(reader.parser, ParserClient) else None
        taught = self.config.algo.teacher is not None
        self._teacher = TeacherClient(process, self._malformed, self._fail) if taught else None

        self._context = EpisodeContext(
            self.config,
            tokenizer,
            self._client.generate,
            trace=process.trace,
            hooks=_hooks(self.config, foreign),
            reader=reader,
            foreign=ForeignContext(self.config, reader, gateway.open) if gateway and reader else None,
        )

    def _open_tickets(self) -> Port:
        return self._open("tickets", self._from_broker, self._greet_broker)

    def _open_frontend(self) -> Port:
        return self._open("frontend", self._from_proxy, self._greet_proxy)

    def _open(self, name: str, handle: Handler[Message], again: Callable[[], None]) -> Port:
        return Port(self._connect(name), handle, self._malformed, self._fail, again)

    def _connect(self, name: str) -> zmq.SyncSocket:
        run = self.process.run
        me = run.names.of("env_server", self.process.index, self.process.incarnation)
        return open_socket(zmq.DEALER, run, name, identity=me)

    def _ask(self, message: messages.Generate | messages.Abort) -> None:
        self._frontend.send(message)

    async def run(self) -> None:
        """Serve until the supervisor says stop. Raises what the server cannot go on after."""
        asyncio.get_running_loop().add_reader(self.process.wake_fd, self._wake.set)
        try:
            await self._begin_serving()
            await self._serve()
        finally:
            await self._stop()

    async def _begin_serving(self) -> None:
        start_s = self.config.timeouts.start_s
        judged = knows_tasks(self.family)  # before the run
        try:
            async with asyncio.timeout(start_s):
                await self.family.start()
        except TimeoutError:
            raise WaitExpired(f"environment {self.config.env.name!r} did not start in {start_s:.0f} s") from None

        if self._parsers is not None:
            await self._parsers.ready()
        if self.process.index == 0:
            if not judged:
                check_held_out(self.config, self.family)
            check_template(self._context.tokenizer, self.config.chat.thinking, self.process.alarms)
        self._greet_proxy()
        self._greet_broker()

    async def _serve(self) -> None:
        previous = time.monotonic()
        while not self.process.stopping:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), self.process.tick_s)
            self._wake.clear()

            for message in self.process.received():
                if isinstance(message, messages.Stop):
                    return
                if isinstance(message, messages.PeerDied):
                    self._peer_died(message)
            if self._fatal is not None:
                raise self._fatal

            now = time.monotonic()
            self._tick(now, now - previous)
            previous = now

    def _peer_died(self, died: messages.PeerDied) -> None:
        """Meet whoever takes the place of a dead peer over a new socket: the old one may still send into the dead
        one's."""
        if died.role == "proxy":
            self._frontend.close(peer_died=True)
            self._frontend = self._open_frontend()
            self._greet_proxy()
        elif died.role == "broker":
            self._tickets.close(peer_died=True)
            self._tickets = self._open_tickets()
            self._greet_broker()
        elif died.role == "parsers" and self._parsers is not None:
            self._parsers.peer_died()
        elif died.role == "teacher" and self._teacher is not None:
            self._teacher.peer_died()

    def _greet_broker(self) -> None:
        """Say hello, also after the connection broke: the broker sends again what did not arrive, and so does this
        server."""
        held = [*self._episodes, *self._unacknowledged]
        self._tickets.send(messages.ServerHello(capacity=self.config.env.episodes_per_server, tickets=held, **self._me))
        self._send_unacknowledged(before=math.inf)

    def _greet_proxy(self) -> None:
        self._frontend.send(messages.ClientHello(**self._me))
        self._client.ask_again()

    def _tick(self, now: float, elapsed_s: float) -> None:
        process = self.process
        activity = self._context.activity
        process.progress += 1
        process.busy = bool(self._episodes)
        if not self._episodes:
            process.waits.add("broker", elapsed_s)
        elif not activity.running["environment"] and activity.running["generate"]:
            process.waits.add("proxy", elapsed_s)
        else:
            process.waits.ended()

        process.stats = {
            "episodes_running": len(self._episodes),
            "env_s": activity.seconds["environment"],
            "generate_wait_s": activity.seconds["generate"],
            "close_failures": activity.close_failures,
            "textless_tokens": activity.textless_tokens,
            "unacknowledged": len(self._unacknowledged),
            "malformed": self._malformed.count,
            "audited": self._auditor.tally.answers,
            "audit_s": self._auditor.tally.seconds,
            **self._counts,
            **(self._parsers.stats if self._parsers else {}),
            **(self._teacher.stats if self._teacher else {}),
        }

        self._send_unacknowledged(before=now)

    def _from_broker(self, message: Message, _peer: bytes) -> None:
        match message:
            case Ticket():
                self._begin(message)
            case messages.CancelTickets(ticket_ids):
                for ticket_id in ticket_ids:
                    self._end(ticket_id, CANCELLED)
            case messages.AckTickets(ticket_ids):
                for ticket_id in ticket_ids:
                    self._unacknowledged.pop(ticket_id, None)
            case _:
                raise ProtocolError(f"{type(message).__name__} from the broker")

    def _from_proxy(self, message: Message, _peer: bytes) -> None:
        match message:
            case messages.Generated():
                self.process.waits.ended()
                self._client.answered(message)
            case messages.Grown():
                self._client.grew(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} from the proxy")

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
        played = await run_episode(ticket, self.family.make, task, self._context, progress)
        return await self._teacher.scored(played) if self._teacher and ticket.kind == "train" else played

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
        turns = running.progress.turns
        end = {"seq": self._seq, "ticket_id": ticket_id, "turns": turns, **self._me}

        if task.cancelled() and running.ending == CANCELLED:
            self._counts["episodes_cancelled"] += 1
            self.process.trace.add(EpisodeEnded(ticket_id, "cancelled", turns))
            self._send_end(messages.TicketCancelled(**end))
        elif task.cancelled() or error is not None:
            self._counts["episodes_failed"] += 1
            reason = running.ending if error is None else _described(error)
            reason = whole(reason)[:REASON_CHARS]
            self.process.trace.add(EpisodeEnded(ticket_id, "failed", turns, reason=reason))
            self._send_end(messages.TicketFailed(reason=reason, **end))

        else:
            self._counts["episodes_done"] += 1
            played = task.result()
            if played.success:
                self._offer(running)
            played = replace(played, info=played.info | self._auditor.news())
            outcome = (turns, played.tokens_generated, played.reward, played.success)
            self.process.trace.add(EpisodeEnded(ticket_id, played.stop_reason, *outcome))
            self._samples.add(played, running.progress.notes)
            self._send_end(replace(played, seq=self._seq, **self._me))

    def _offer(self, running: RunningEpisode) -> None:
        """A rewarded answer, for the audit of the verifier."""
        ticket = running.ticket
        task = self.family.task("eval" if ticket.kind == "eval" else "train", ticket.task_index)
        self._auditor.offer(ticket.version.n, task, running.progress.answer)

    def _send_end(self, end: End) -> None:
        self._unacknowledged[end.ticket_id] = (end, time.monotonic() + RESEND_S)
        if isinstance(end, Trajectory):
            self._trajectories.send(end)
        else:
            self._tickets.send(end)

    def _send_unacknowledged(self, before: float) -> None:
        """Send again what was due before this time."""
        for end, due in list(self._unacknowledged.values()):
            if due <= before:
                self._counts["resent"] += 1
                self._send_end(end)

    def _fail(self, error: Exception) -> None:
        """The server itself cannot go on: `run` raises this."""
        if self._fatal is None:
            self._fatal = error
        self._wake.set()

    async def _stop(self) -> None:
        """End every episode and the family's workers, within STOP_S each."""
        self._stopped = True
        self._client.close()
        await self._auditor.stop()
        if self._parsers is not None:
            self._parsers.close()

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
        except Exception as error:  # of one that had started by half, for instance: what failed then is what is told
            print(f"environment {self.config.env.name!r} did not stop: {_described(error)}", file=sys.stderr)

        if self._gateway is not None:
            await self._gateway.stop()
        if self._teacher is not None:
            self._teacher.close()
        for socket in (self._tickets, self._frontend, self._trajectories):
            socket.close()
        self._samples.close()


def _gateway(run: RunFile) -> Gateway:
    from envs.gateway.server import Gateway  # aiohttp costs 36 MB, which other environments do without

    return Gateway(run.host)


def _hooks(config: Config, foreign: bool) -> EpisodeHooks:
    """The hooks of this role. Raises ConfigError."""
    loop = asyncio.get_running_loop()
    named = config.rollout.hooks
    hooks = make_hooks("env_server", named, loop.call_soon, lambda release: loop.call_later(JOIN_S, release))
    if hooks and foreign:
        names = ", ".join(type(hook).__name__ for hook in hooks)
        raise ConfigError(
            f"rollout.hooks={named}: agents that own their loop have no turns at which {names} could act; leave it out"
        )
    return EpisodeHooks(hooks)


def _described(error: BaseException) -> str:
    """One line for the broker; what is no plain failure leaves its traceback in this process's log."""
    if isinstance(error, EpisodeFailed | TokenizerError):
        return str(error)
    traceback.print_exception(error, file=sys.stderr)
    return f"{type(error).__name__}: {error}"


async def serve(process: Process) -> None:
    family = make_family(process.config)
    check_data(process.run.data, process.config.env.name, family)
    await EnvServer(process, family).run()


def main() -> None:
    with Process("env_server", context_from_command_line()) as process:
        AwakeLoop(process.tick_s).run_until_complete(serve(process))
    leave()  # whatever abandoned calls and threads of an environment do


if __name__ == "__main__":
    main()

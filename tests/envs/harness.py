"""A real environment server process with everything around it played by the test: broker, proxy and supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from rl.wire.messages import (
    Abort,
    AckTickets,
    AlarmRaised,
    ClientHello,
    Fatal,
    Generate,
    Generated,
    Grown,
    Heartbeat,
    Message,
    ServerHello,
    Stop,
    Ticket,
    TicketCancelled,
    TicketFailed,
    Trajectory,
    Version,
)
from rl.wire.run import RunFile
from rl.wire.sockets import open_socket, send_to
from tests.inbox import arrived
from tests.rollout.trajectories import reply_columns

REPOSITORY = Path(__file__).parents[2]
Result = Trajectory | TicketFailed | TicketCancelled
Answer = Callable[[Generate], Generated | None]


def generated(request: Generate, ids: list[int], finish_reason: str = "stop", **fields: Any) -> Generated:
    return Generated(
        request_id=request.request_id,
        session=request.session,
        columns=reply_columns(ids, -0.5, request.version.n),
        timeline=request.version.timeline,
        finish_reason=finish_reason,
        tokens_generated=len(ids),
        generator=0,
        **fields,
    )


def ticket(ticket_id: int, **fields: Any) -> Ticket:
    values: dict[str, Any] = {"sample_id": ticket_id, "group_id": 0, "task_index": ticket_id, "version": Version(0, 3)}
    return Ticket(ticket_id=ticket_id, **(values | fields))


class ServerPeers:
    """Binds the sockets, starts the server and plays its peers. `answer(request)` of None leaves it unanswered."""

    def __init__(self, run: RunFile, answer: Answer, *, acknowledge: bool = True) -> None:
        self.answer = answer
        self.acknowledge = acknowledge
        self.arrived: list[Result] = []  # repeats included, which a server sends where an answer to it is late
        self.results: list[Result] = []  # the first of each number
        self.requests: list[Generate] = []
        self.aborts: list[int] = []
        self.heartbeat: Heartbeat | None = None
        self.fatal: Fatal | None = None
        self.hello: ServerHello | None = None

        self._context = zmq.Context()
        kinds = {"control": zmq.ROUTER, "tickets": zmq.ROUTER, "trajectories": zmq.ROUTER, "frontend": zmq.ROUTER}
        self.sockets = {
            name: open_socket(kind, run, name, bind=True, context=self._context) for name, kind in kinds.items()
        }
        environment = os.environ | {"FRESCO_PARENT_PID": str(os.getpid())}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "envs.server", "--run", str(run.folder)], cwd=REPOSITORY, env=environment
        )

    def __enter__(self) -> ServerPeers:
        self.until(lambda: self.hello is not None, "the server's hello")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        for socket in self.sockets.values():
            socket.close(linger=0)
        self._context.term()

    def send(self, message: Message) -> None:
        send_to(self.sockets["tickets"], b"env_server.0.0", message)

    def reply(self, answer: Generated | Grown) -> None:
        send_to(self.sockets["frontend"], b"env_server.0.0", answer)

    def ended(self) -> dict[int, Result]:
        """The first result of each ticket."""
        return {result.ticket_id: result for result in reversed(self.results)}

    def until(self, condition: Callable[[], bool], what: str, deadline_s: float = 240) -> None:
        deadline = time.monotonic() + deadline_s
        poller = zmq.Poller()
        for socket in self.sockets.values():
            poller.register(socket, zmq.POLLIN)
        while not condition():
            assert time.monotonic() < deadline, f"waited {deadline_s} s for {what}; results: {self.results}"
            ended = self.process.poll() is not None and self.fatal is None
            ready = poller.poll(50)
            assert ready or not ended, (
                f"the server ended, waiting for {what}"
            )  # its last words may still be on their way
            for socket, _ in ready:
                for _peer, message in arrived(socket):
                    self._handle(message)

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() >= end, "the time to pass")

    def stop(self) -> int:
        """Ask for a clean stop; the exit status."""
        send_to(self.sockets["control"], b"env_server.0.0", Stop("test"))
        return self.process.wait(timeout=240)

    def _keep(self, result: Result) -> None:
        self.arrived.append(result)
        if all(result.seq != known.seq for known in self.results):
            self.results.append(result)

    def _handle(self, message: Message) -> None:
        match message:
            case Trajectory():
                self._keep(message)
                if self.acknowledge:
                    self.send(AckTickets([message.ticket_id]))
            case TicketFailed() | TicketCancelled():
                self._keep(message)
            case Generate():
                self.requests.append(message)
                answer = self.answer(message)

                if answer is not None:
                    self.reply(answer)
            case Abort(request_id):
                self.aborts.append(request_id)
            case ServerHello():
                self.hello = message
            case Heartbeat():
                self.heartbeat = message
            case Fatal():
                self.fatal = message
            case _:
                assert isinstance(message, AlarmRaised | ClientHello) or getattr(message, "role", "") == "env_server"

"""vLLM's parsers for all environment servers of a machine (`python -m rollout.parsers.process --run DIR`).

They import torch, which environment servers never do, and take seconds and 400 MB to import: so there is one process.
What a model wrote may be made to keep a parser busy for ever. A parse is interrupted after its time; a parser that
cannot be interrupted is busy without progress, and the supervisor replaces the process.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import deque
from collections.abc import Iterator

import zmq

from rl.wire.messages import ClientHello, Message, ParserHello, ParseTurn, ProtocolError, TurnParsed
from rl.wire.process import Process, leave
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import ProcessContext, RunFile, context_from_command_line
from rl.wire.sockets import PeerGone, open_socket, send_to
from rollout.episodes.tokenizer import load_tokenizer
from rollout.parsers.fitting import ParserRefused, fitting_opener
from rollout.parsers.vllm_parser import VllmParser

_REASON_CHARS = 300
_SHARE = 0.1  # of `chat.parse_deadline_s`: so that a parse that is interrupted delays those behind it, and no more


class Overran(BaseException):
    """A parse took its time. It is no Exception: parsers catch those."""


class Parsers:
    def __init__(self, process: Process, parser: VllmParser, opener: str) -> None:
        self._process = process
        self._parser = parser
        self._opener = opener
        self._deadline_s = process.config.chat.parse_deadline_s
        self._limit_s = min(_SHARE * self._deadline_s, process.config.timeouts.hang_s / 2)
        self._waiting: deque[tuple[float, bytes, ParseTurn]] = deque()  # until when somebody does, and who
        self._turns = 0
        self._failures = 0
        self._malformed = Malformed("parsers")
        self._socket = open_socket(zmq.ROUTER, process.run, "parsers", bind=True)

    def serve(self) -> None:
        """Serve until the supervisor says stop."""
        process = self._process
        receiver = Receiver({self._socket: self._from_client}, self._malformed, process.wake_fd)
        while not process.stopping:
            process.progress += 1
            receiver.wait(0 if self._waiting else process.tick_s)
            receiver.drain()
            self._parse_next()
            for _ in process.received():  # whoever died: its successor says hello
                pass
            process.stats = {"turns": self._turns, "failures": self._failures, "malformed": self._malformed.count}

    def close(self) -> None:
        self._socket.close()

    def _from_client(self, message: Message, peer: bytes) -> None:
        self._process.run.names.sender(peer, "env_server", self._process.config.env.servers)
        match message:
            case ClientHello():
                self._answer(peer, ParserHello(self._opener))
            case ParseTurn():
                self._waiting.append((time.monotonic() + self._deadline_s, peer, message))
            case _:
                raise ProtocolError(f"{type(message).__name__} from client {peer!r}")

    def _parse_next(self) -> None:
        """Parse one turn that somebody still waits for: those behind hostile ones would all be read too late."""
        while self._waiting:
            until, peer, asked = self._waiting.popleft()
            if time.monotonic() < until:
                self._answer(peer, self._parsed(asked))
                return

    def _answer(self, peer: bytes, message: Message) -> None:
        with contextlib.suppress(PeerGone):
            send_to(self._socket, peer, message)

    def _parsed(self, asked: ParseTurn) -> TurnParsed:
        self._process.progress += 1
        self._process.busy = True
        self._turns += 1
        try:
            with _at_most(self._limit_s):
                found = self._parser.parse(asked.text, asked.tools)
            return TurnParsed(asked.request_id, found.content, found.reasoning, list(found.calls))

        except Overran:
            failed = f"the parser took longer than {self._limit_s:g} s"
        except Exception as error:
            failed = f"the parser raised {type(error).__name__}: {str(error)[:_REASON_CHARS]!a}"
        finally:
            self._process.busy = False

        self._failures += 1
        return TurnParsed(asked.request_id, failed=failed)


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Raises Overran in the main thread, again and again if that is caught; regular expressions look for signals."""

    def overran(*_: object) -> None:
        raise Overran

    before = signal.signal(signal.SIGALRM, overran)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def make_parser(run: RunFile) -> tuple[VllmParser, str]:
    """The parser with its opener. Raises ParserRefused."""
    chat = run.config.chat
    folder = run.model_folder
    if folder is None:
        raise ParserRefused(chat, "a simulated model has no tokenizer")
    try:
        parser = VllmParser(chat, folder)
    except Exception as error:
        raise ParserRefused(chat, f"it does not fit this model: {error}") from error
    return parser, fitting_opener(parser.parse, parser.marks, chat, load_tokenizer(folder, chat.template_options))


def main(context: ProcessContext | None = None) -> None:
    with Process("parsers", context or context_from_command_line()) as process:
        parser = make_parser(process.run)
        with contextlib.closing(Parsers(process, *parser)) as parsers:
            parsers.serve()
    leave()


if __name__ == "__main__":
    main()

"""An environment server's line to the process of vLLM's parsers. Nothing here imports torch, and nothing blocks.

A turn that is not read within `chat.parse_deadline_s` stays content, whatever the reason. It is counted. Turns are
asked for again when the process has died or the connection broke, but not after two deaths: one of them may be what it
dies of.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from rl.wire.messages import ClientHello, Message, ParserHello, ParseTurn, ProtocolError, TurnParsed
from rl.wire.process import Process, WaitExpired
from rl.wire.receiving import Malformed, Port
from rl.wire.sockets import open_socket
from rollout.episodes.parsing import DistantParser, ParsedTurn, SampledText, TurnReader, make_reader
from rollout.episodes.tokenizer import AgentTokenizer

_LOOK_S = 0.1
_MOST_DEATHS = 2  # of the process, while it was to read a turn
_QUIET_S = 10.0  # between two lines on turns that were not read


@dataclass
class _Asked:
    turn: ParseTurn
    answer: asyncio.Future[TurnParsed]
    deaths: int = 0


class ParserClient(DistantParser):
    """Asks the parser process, on the running event loop. `failed` hears of what the server cannot go on after."""

    def __init__(self, process: Process, malformed: Malformed, failed: Callable[[Exception], None]) -> None:
        self.stats = {"parse_failures": 0, "parse_wait_s": 0.0}  # turns that were not read; of all turns
        self._process = process
        self._deadline_s = process.config.chat.parse_deadline_s
        self._malformed = malformed
        self._failed = failed
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._ready = asyncio.Event()
        self._quiet_until = 0.0
        self._closed = False
        self._port = self._open()

    async def ready(self) -> None:
        """The parser has answered, or the run ends. Raises WaitExpired."""
        self._greet()
        start_s = self._process.config.timeouts.start_s
        deadline = time.monotonic() + start_s
        while not self._ready.is_set() and not self._process.stopping:
            if time.monotonic() > deadline:
                raise WaitExpired(f"env_server.{self._process.index} waited {start_s:g} s for parsers.0 to be ready")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ready.wait(), _LOOK_S)

    async def parsed(self, turn: SampledText) -> ParsedTurn:
        tools = json.dumps(list(turn.tools), default=str)
        message = ParseTurn(next(self._numbers), turn.begun + turn.text, tools)
        begin = time.monotonic()
        answer = await self._answer(message)
        self.stats["parse_wait_s"] += time.monotonic() - begin
        if not answer.failed:
            return ParsedTurn(answer.content, answer.reasoning, tuple(answer.calls))

        self.stats["parse_failures"] += 1
        if time.monotonic() > self._quiet_until:
            self._quiet_until = time.monotonic() + _QUIET_S
            which = f"turn {self.stats['parse_failures']:.0f} that stays content"
            print(f"{which}: {answer.failed:.300}", file=sys.stderr, flush=True)
        return ParsedTurn(turn.text)

    def peer_died(self) -> None:
        """The successor is met over a new socket, as everywhere."""
        for asked in self._asked.values():
            asked.deaths += 1
            if asked.deaths == _MOST_DEATHS:
                failed = f"parsers.0 died {_MOST_DEATHS} times while it was to read it"
                self._end(asked, TurnParsed(asked.turn.request_id, failed=failed))
        self._port.close(peer_died=True)
        self._port = self._open()
        self._greet()

    def close(self) -> None:
        """The run ends: nobody waits any more."""
        self._closed = True
        for asked in self._asked.values():
            self._end(asked, TurnParsed(asked.turn.request_id, failed="the run ends"))
        self._port.close()

    # ------------------------------------------------------------ inside

    async def _answer(self, turn: ParseTurn) -> TurnParsed:
        if self._closed:
            return TurnParsed(turn.request_id, failed="the run ends")
        asked = self._asked[turn.request_id] = _Asked(turn, asyncio.get_running_loop().create_future())
        self._port.send(turn)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asked.answer
        except TimeoutError:
            late = f"parsers.0 did not answer within chat.parse_deadline_s={self._deadline_s:g}"
            return TurnParsed(turn.request_id, failed=late)
        finally:
            del self._asked[turn.request_id]

    def _open(self) -> Port:
        me = self._process.run.names.of("env_server", self._process.index, self._process.incarnation)
        socket = open_socket(zmq.DEALER, self._process.run, "parsers", identity=me)
        return Port(socket, self._from_parsers, self._malformed, self._failed, self._greet)

    def _greet(self) -> None:
        """Say hello, also after the connection broke: what was asked may be lost, or its answer."""
        self._port.send(ClientHello(self._process.index, self._process.incarnation))
        for asked in self._asked.values():
            if not asked.answer.done():
                self._port.send(asked.turn)

    def _from_parsers(self, message: Message, _peer: bytes) -> None:
        match message:
            case ParserHello(opener):
                self.opener = opener
                self._ready.set()
            case TurnParsed():
                if asked := self._asked.get(message.request_id):  # else: it came too late
                    self._end(asked, message)
            case _:
                raise ProtocolError(f"{type(message).__name__} from the parsers")

    def _end(self, asked: _Asked, answer: TurnParsed) -> None:
        if not asked.answer.done():
            asked.answer.set_result(answer)


def open_reader(
    process: Process, tokenizer: AgentTokenizer, malformed: Malformed, failed: Callable[[Exception], None]
) -> TurnReader:
    """A reader with the parser that `chat.parser` names. Raises ConfigError or TokenizerError as `make_reader` does."""
    if process.config.chat.vllm_names is None:
        return make_reader(process.config, tokenizer)
    return TurnReader(tokenizer, ParserClient(process, malformed, failed))

"""An environment server's line to the teacher of a distillation. Nothing here imports torch, and nothing blocks.

An episode that has ended is delivered once the teacher has scored it. What waits is asked again when the teacher has
died, or the connection broke: nothing is lost but time, and the ticket's own deadline bounds that.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable

import numpy as np
import zmq
from msgspec.structs import replace

from rl.wire.columns import TEACHER_LOGP
from rl.wire.messages import Message, ProtocolError, ScoreTokens, TokenSequence, TokensScored, Trajectory
from rl.wire.process import Process
from rl.wire.receiving import Malformed, Port
from rl.wire.sockets import open_socket


class TeacherClient:
    """Asks the teacher, on the running event loop. `failed` hears of what the server cannot go on after."""

    def __init__(self, process: Process, malformed: Malformed, failed: Callable[[Exception], None]) -> None:
        self.stats = {"teacher_wait_s": 0.0}  # of all episodes
        self._process = process
        self._malformed = malformed
        self._failed = failed
        self._asked: dict[int, tuple[ScoreTokens, asyncio.Future[np.ndarray]]] = {}
        self._numbers = itertools.count(1)
        self._port = self._open()

    async def scored(self, played: Trajectory) -> Trajectory:
        """The trajectory with the column `teacher_logp` filled at the tokens that were sampled."""
        begin = time.monotonic()
        sequences = await asyncio.gather(*map(self._scored, played.sequences))
        self.stats["teacher_wait_s"] += time.monotonic() - begin
        return replace(played, sequences=list(sequences))

    def peer_died(self) -> None:
        """The successor is met over a new socket, as everywhere."""
        self._port.close(peer_died=True)
        self._port = self._open()
        self._ask_again()

    def close(self) -> None:
        self._port.close()

    async def _scored(self, sequence: TokenSequence) -> TokenSequence:
        number = next(self._numbers)
        asked = ScoreTokens(number, sequence.token_ids, sequence.loss_mask)
        answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._asked[number] = (asked, answer)
        self._port.send(asked)
        try:
            logp = await answer
        finally:
            del self._asked[number]

        column = TEACHER_LOGP.full(len(sequence.token_ids))
        column[sequence.loss_mask != 0] = logp
        return replace(sequence, columns=sequence.columns | {TEACHER_LOGP.name: column})

    def _open(self) -> Port:
        me = self._process.run.names.of("env_server", self._process.index, self._process.incarnation)
        socket = open_socket(zmq.DEALER, self._process.run, "teacher", identity=me)
        return Port(socket, self._from_teacher, self._malformed, self._failed, self._ask_again)

    def _ask_again(self) -> None:
        for asked, answer in self._asked.values():
            if not answer.done():
                self._port.send(asked)

    def _from_teacher(self, message: Message, _peer: bytes) -> None:
        if not isinstance(message, TokensScored):
            raise ProtocolError(f"{type(message).__name__} from the teacher")
        if message.request_id not in self._asked:  # nobody waits any more
            return
        asked, answer = self._asked[message.request_id]
        count = int(np.count_nonzero(asked.loss_mask))
        if message.logp.shape != (count,) or message.logp.dtype != np.float32:
            raise ProtocolError(f"{message.logp.dtype}{message.logp.shape} log-probabilities of {count} tokens")
        if not answer.done():
            answer.set_result(message.logp)

"""The teacher of a distillation (`python -m rollout.teacher.process --run DIR`): scores what the student has sampled.

Environment servers send whole sequences and get the log-probability of each sampled token under the teacher. What
waits is scored together. The teacher never changes, so a successor answers as it did.
"""

from __future__ import annotations

import contextlib
from collections import deque

import numpy as np
import zmq

from rl.wire.messages import Message, ProtocolError, ScoreTokens, TokensScored
from rl.wire.process import Process, leave
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import context_from_command_line
from rl.wire.sockets import PeerGone, open_socket, send_to
from rollout.broker.validation import vocabulary_of
from rollout.teacher.scoring import Score, make_score


class Teacher:
    def __init__(self, process: Process, score: Score) -> None:
        self._process = process
        self._score = score
        self._most_tokens = process.config.learner.pack_tokens(process.run.device)
        self._vocabulary = vocabulary_of(process.run)
        self._waiting: deque[tuple[bytes, ScoreTokens]] = deque()
        self._tokens = 0
        self._malformed = Malformed("teacher")
        self._socket = open_socket(zmq.ROUTER, process.run, "teacher", bind=True)

    def serve(self) -> None:
        """Serve until the supervisor says stop."""
        process = self._process
        receiver = Receiver({self._socket: self._from_client}, self._malformed, process.wake_fd)
        while not process.stopping:
            process.progress += 1
            receiver.wait(0 if self._waiting else process.tick_s)
            receiver.drain()
            if self._waiting:
                self._score_some()
            for _ in process.received():  # whoever died: its successor asks anew
                pass
            process.stats = {"tokens": self._tokens, "waiting": len(self._waiting), "malformed": self._malformed.count}

    def close(self) -> None:
        self._socket.close()

    def _from_client(self, message: Message, peer: bytes) -> None:
        self._process.run.names.sender(peer, "env_server", self._process.config.env.servers)
        if not isinstance(message, ScoreTokens):
            raise ProtocolError(f"{type(message).__name__} from client {peer!r}")
        ids, mask = message.token_ids, message.loss_mask
        fits = ids.dtype == np.int32 and mask.dtype == np.uint8 and ids.shape == mask.shape and ids.ndim == 1
        if not fits or not len(ids) or ids.view(np.uint32).max() >= self._vocabulary:
            raise ProtocolError(f"tokens of {peer!r} that no model can score")
        self._waiting.append((peer, message))

    def _score_some(self) -> None:
        """What was asked first, together with what follows it and fits."""
        chosen = [self._waiting.popleft()]
        tokens = len(chosen[0][1].token_ids)
        while self._waiting and tokens + len(self._waiting[0][1].token_ids) <= self._most_tokens:
            chosen.append(self._waiting.popleft())
            tokens += len(chosen[-1][1].token_ids)

        self._process.busy = True
        found = self._score([asked for _, asked in chosen])
        self._process.busy = False
        self._tokens += tokens
        for (peer, asked), logp in zip(chosen, found, strict=True):
            with contextlib.suppress(PeerGone):
                send_to(self._socket, peer, TokensScored(asked.request_id, logp))


def main() -> None:
    with Process("teacher", context_from_command_line()) as process:
        score = make_score(process.run)
        with contextlib.closing(Teacher(process, score)) as teacher:
            teacher.serve()
    leave()


if __name__ == "__main__":
    main()

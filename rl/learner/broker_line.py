"""Rank 0's line to the broker (`steps`), which outlives the broker's process and a broken connection.

What has no answer yet is kept, and told again in the same order. All of it may come twice: the
broker takes it once, or answers as before.
"""

from __future__ import annotations

from collections import deque

import zmq

from rl.wire.messages import BatchRequest, EvalRequest, Published, SaveRequest
from rl.wire.process import Process
from rl.wire.sockets import made_again, open_socket, send

ToBroker = BatchRequest | Published | EvalRequest | SaveRequest


class BrokerLine:
    """`socket` is another one after `reopen`."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._unanswered: deque[ToBroker] = deque()
        self.socket = self._open()

    def tell(self, message: ToBroker) -> None:
        self._unanswered.append(message)
        send(self.socket, message)

    def answered(self, message: ToBroker) -> None:
        """The broker has taken it, and so everything that was told before."""
        while self._unanswered and self._unanswered.popleft() != message:
            pass

    def reopen(self) -> None:
        """The broker's process has died: a new socket sends nothing into the dead one's."""
        self.socket.close(linger=0)
        self.socket = self._open()
        self._tell_again()

    def mend(self) -> None:
        """Call now and then: where the connection was made again, what was on its way is told again."""
        if made_again(self.socket):
            self._tell_again()

    def _tell_again(self) -> None:
        for message in self._unanswered:
            send(self.socket, message)

    def _open(self) -> zmq.SyncSocket:
        name = self._process.run.names.of("learner", 0, self._process.incarnation)
        return open_socket(zmq.DEALER, self._process.run, "steps", identity=name)

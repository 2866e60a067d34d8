"""The client side of generation: requests out, answers back to whoever waits, aborts that are always awaited.

Sans sockets: messages leave through `send`, answers come in through `answered`. Invariant: a request that was sent
is forgotten only when its answer has arrived, so a cancelled episode ends after its generation has ended. It is asked
again when the proxy has died, or the connection to it broke (`ask_again`).

Somebody may read along (`Generate.stream`). What has been read is not taken back. A request whose answer may be lost
ends with what was read of it, like one that a generator has aborted, and whoever asked goes on from there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from msgspec.structs import replace

from rl.wire.columns import ONE_TURN, masked_columns
from rl.wire.messages import Abort, Generate, Generated, Grown
from rl.wire.process import WaitExpired

Read = Callable[[int, list[int]], None]
"""(place in the response, ids): what somebody who reads along is told."""


@dataclass
class _Asked:
    """A request without an answer."""

    request: Generate
    answer: asyncio.Future[Generated]
    read: Read | None = None
    aborted: bool = False
    parts: list[dict[str, np.ndarray]] = field(default_factory=list)  # of what was read
    tokens: int = 0  # in them

    def grew(self, start: int, columns: dict[str, np.ndarray]) -> None:
        """Tokens from `start` on. Some may be known; where some are missing, the answer will have them."""
        ids = columns["token_ids"]
        if self.read is None or start > self.tokens or start + ids.size <= self.tokens:
            return

        known = self.tokens - start
        self.parts.append({name: values[known:] for name, values in columns.items()})
        self.read(self.tokens, ids[known:].tolist())
        self.tokens = start + int(ids.size)

    def as_read(self) -> Generated:
        """The answer as far as it was read."""
        read = {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
        return Generated(
            request_id=self.request.request_id,
            session=self.request.session,
            columns=masked_columns({"token": self.tokens, **ONE_TURN}, "generator") | read,
            timeline=self.request.version.timeline,
            finish_reason="abort",
            tokens_generated=self.tokens,
            generator=-1,
        )


class GenerationClient:
    def __init__(self, send: Callable[[Generate | Abort], None], abort_deadline_s: float) -> None:
        self._send = send
        self._abort_deadline_s = abort_deadline_s
        self._waiting: dict[int, _Asked] = {}
        self._next_id = 1
        self._closed = False

    def __len__(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    async def generate(
        self, request: Generate, ending: asyncio.Future[None] | None = None, read: Read | None = None
    ) -> Generated:
        """The answer to this request, under a fresh id. Cancelled: aborts it and waits for the answer first.

        Once `ending` is done the request is aborted, and answered with what it had sampled by then. `read` is told of
        the tokens while they are sampled, where `request.stream` asks for them.
        Raises WaitExpired if an abort is not answered within `abort_deadline_s`: the server cannot go on.
        """
        request_id = self._next_id
        self._next_id += 1
        asked = _Asked(replace(request, request_id=request_id), asyncio.get_running_loop().create_future(), read)
        self._waiting[request_id] = asked
        self._send(asked.request)

        try:
            waited: set[asyncio.Future[Any]] = {asked.answer} if ending is None else {asked.answer, ending}
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not asked.answer.done():
                await self._abort(asked)
            return asked.answer.result()
        except asyncio.CancelledError:
            if not asked.answer.done() and not self._closed:
                await self._abort(asked)
            raise
        finally:
            self._waiting.pop(request_id, None)

    def answered(self, generated: Generated) -> None:
        """An answer has arrived; one that nobody waits for (after `close`) is dropped."""
        asked = self._waiting.get(generated.request_id)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result(generated)

    def grew(self, grown: Grown) -> None:
        """Requests have grown; those that nobody waits for any more are passed over."""
        for request_id, (start, columns) in grown.requests.items():
            asked = self._waiting.get(request_id)
            if asked is not None and not asked.answer.done():
                asked.grew(start, columns)

    def ask_again(self) -> None:
        """The proxy is a new one, or the connection broke: requests or their answers may be lost."""
        for request_id, asked in self._waiting.items():
            if asked.answer.done():
                continue
            if asked.tokens and not asked.aborted:
                self._send(Abort(request_id))
                asked.answer.set_result(asked.as_read())
                continue
            self._send(asked.request)
            if asked.aborted:
                self._send(Abort(request_id))

    def close(self) -> None:
        """The run ends: cancelled requests no longer wait for their answers."""
        self._closed = True

    async def _abort(self, asked: _Asked) -> None:
        asked.aborted = True
        request = asked.request
        self._send(Abort(request.request_id))
        done, _ = await asyncio.wait({asked.answer}, timeout=self._abort_deadline_s)
        if not done:
            raise WaitExpired(
                f"the proxy has not answered the abort of request {request.request_id} (ticket {request.session}) "
                f"in {self._abort_deadline_s:.0f} s"
            )

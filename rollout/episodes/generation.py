"""The client side of generation: requests out, answers back to whoever waits, aborts that are always awaited.

Sans sockets: messages leave through `send`, answers come in through `answered`. Invariant: a request that was sent
is forgotten only when its answer has arrived, so a cancelled episode ends after its generation has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from msgspec.structs import replace

from rl.core.messages import Abort, Generate, Generated
from rl.core.process import WaitExpired


class GenerationClient:
    def __init__(self, send: Callable[[Generate | Abort], None], abort_deadline_s: float) -> None:
        self._send = send
        self._abort_deadline_s = abort_deadline_s
        self._waiting: dict[int, asyncio.Future[Generated]] = {}
        self._next_id = 1
        self._closed = False

    def __len__(self) -> int:
        """Requests without an answer."""
        return len(self._waiting)

    async def generate(self, request: Generate) -> Generated:
        """The answer to this request, under a fresh id. Cancelled: aborts it and waits for the answer first.

        Raises WaitExpired if an abort is not answered within `abort_deadline_s`: the server cannot go on.
        """
        request_id = self._next_id
        self._next_id += 1
        answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = answer
        self._send(replace(request, request_id=request_id))

        try:
            await asyncio.wait({answer})
            return answer.result()
        except asyncio.CancelledError:
            if not answer.done() and not self._closed:
                await self._abort(request_id, request.session, answer)
            raise
        finally:
            self._waiting.pop(request_id, None)

    def answered(self, generated: Generated) -> None:
        """An answer has arrived; one that nobody waits for (after `close`) is dropped."""
        answer = self._waiting.get(generated.request_id)
        if answer is not None and not answer.done():
            answer.set_result(generated)

    def close(self) -> None:
        """The run ends: cancelled requests no longer wait for their answers."""
        self._closed = True

    async def _abort(self, request_id: int, session: int, answer: asyncio.Future[Generated]) -> None:
        self._send(Abort(request_id))
        done, _ = await asyncio.wait({answer}, timeout=self._abort_deadline_s)
        if not done:
            raise WaitExpired(
                f"the proxy has not answered the abort of request {request_id} (ticket {session}) "
                f"in {self._abort_deadline_s:.0f} s"
            )

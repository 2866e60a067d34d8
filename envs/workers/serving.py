"""The worker's side: requests on stdin, one after another in the main thread; replies on stdout in the same order."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import BinaryIO

from envs.workers.wire import CHUNK, Body, CurrentRequest, FrameReader, Result, WorkerReply, WorkerRequest, frame
from rl.wire.process import die_with_parent
from rl.wire.text import whole

MOST_TOLD = 2000  # characters of what an exception says
HELD = 8  # replies; of a long queue an eighth: less than its requests wait anyway


def begin_worker() -> BinaryIO:
    """Where replies go. To be called first: what a library prints on stdout would look like a reply."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = os.fdopen(os.dup(1), "wb", CHUNK)
    os.dup2(2, 1)
    return replies


def told(error: Exception) -> str:
    """An exception as a text that a message can carry, whatever it says of itself."""
    try:
        said = whole(str(error))[:MOST_TOLD]
    except Exception as failed:
        said = f"(which raised {type(failed).__name__} when asked what it is)"
    return f"{type(error).__name__}: {said}"


def serve(
    replies: BinaryIO,
    descriptor: int,
    kind: type[Body],
    answer: Callable[[int, Body | None], Result | None],
    *,
    grouped: bool = False,
) -> None:
    """Say "ready", then answer until the server closes the pipe.

    `descriptor`: of the page that both share, the first argument of the process. `answer(session, request)`: None is
    the end of the session; what it raises fails this request alone. `grouped`: while requests wait, replies leave a
    few at a time. Every write wakes the server, which costs both. But a held reply ages in the eyes of the server, so
    this is for requests that are far shorter than the deadline.
    """
    current = CurrentRequest(descriptor)

    def answered(request: WorkerRequest[Body]) -> WorkerReply[Result]:
        current.set(request.number)
        try:
            return WorkerReply(request.number, answer(request.session, request.body))
        except Exception as error:
            return WorkerReply(request.number, error=told(error))

    replies.write(frame(WorkerReply(0)))
    replies.flush()
    reader: FrameReader[WorkerRequest[Body]] = FrameReader(WorkerRequest[kind])  # type: ignore[valid-type]

    while chunk := os.read(0, CHUNK):
        waiting = reader.feed(chunk)
        held = max(HELD, len(waiting) // HELD) if grouped else 1
        for place, request in enumerate(waiting, 1):
            replies.write(frame(answered(request)))
            if place % held == 0:
                replies.flush()

        replies.flush()

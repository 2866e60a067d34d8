"""Foreign code in a task of its own: whatever it does (raise, hang, swallow its cancellation) stays there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

CANCEL_GRACE_S = 1.0  # for foreign code to honour its cancellation before it is abandoned

T = TypeVar("T")


class Overrun(Exception):
    """Foreign code ran past its deadline."""


async def isolated(call: Coroutine[Any, Any, T], deadline_s: float) -> T:
    """What the call answers, or raises. Past the deadline it is cancelled, and abandoned if it resists: Overrun."""

    async def guarded() -> T:
        try:
            return await call
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would let these end the whole server
            raise RuntimeError(f"{type(error).__name__}({error})") from error

    task = asyncio.ensure_future(guarded())
    try:
        await asyncio.wait({task}, timeout=deadline_s)
        if not task.done():
            raise Overrun
        if task.cancelled():
            raise RuntimeError("it cancelled itself")
        return task.result()

    finally:
        if not task.done():
            task.cancel()
            task.add_done_callback(_forget)
            await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


def _forget(task: asyncio.Task[Any]) -> None:
    """Take the exception of an abandoned call, so that asyncio does not report it at collection."""
    if not task.cancelled():
        task.exception()

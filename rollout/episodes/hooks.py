"""What a hook of an environment server is: every episode asks it before it generates, and before its environment steps.

Whatever it keeps is of one server. No clock and no sockets, so that the simulator drives the same object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

from rl.config.hooks import Hook, Role

Call = Callable[[], None]
Post = Callable[[Call], object]
# What an episode waits to do.
STEP = 0
GENERATE = 1


class EpisodeHook(Hook):
    """Every method may be left out."""

    role: ClassVar[Role] = "env_server"

    def __init__(self, options: Any, post: Post, settle: Post) -> None:
        """`post` delivers a call after what is under way now, `settle` when what was sent together has arrived."""
        self.options = options
        self.post = post
        self.settle = settle

    def join(self, ticket_id: int) -> None:
        """An episode has begun, with its reset."""

    def arrive(self, ticket_id: int, phase: int, go_on: Call) -> None:
        """An episode waits to do what `phase` says (STEP or GENERATE): call `go_on` once, now or later.

        An episode that ends meanwhile leaves; a later `go_on` is harmless then.
        """
        go_on()

    def leave(self, ticket_id: int) -> None:
        """An episode has ended, however it did. This may be told twice."""


class EpisodeHooks(list[EpisodeHook]):
    """All of one server; an episode goes on when the last of them lets it."""

    def join(self, ticket_id: int) -> None:
        for hook in self:
            hook.join(ticket_id)

    def arrive(self, ticket_id: int, phase: int, go_on: Call) -> None:
        for hook in reversed(self):
            go_on = partial(hook.arrive, ticket_id, phase, go_on)
        go_on()

    def leave(self, ticket_id: int) -> None:
        for hook in self:
            hook.leave(ticket_id)

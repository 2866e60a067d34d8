"""A user's module: one hook for each role, that no file of Fresco names."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from rl.config.section import Section
from rollout.broker.groups import Groups
from rollout.broker.hooks import BrokerHook, Suspend
from rollout.episodes.hooks import Call, EpisodeHook
from rollout.proxy.hooks import ProxyHook
from rollout.proxy.state import GeneratorState, RoutedRequest


class AwayOptions(Section):
    server: int = Field(ge=0)
    """The environment server that gets no tickets."""


class Away(BrokerHook):
    """A server that gets no tickets."""

    Options = AwayOptions

    def __init__(self, options: AwayOptions, groups: Groups) -> None:
        super().__init__(options, groups)
        self.server = options.server
        self.batches = 0

    def server_joined(self, now: float, server: int) -> Iterator[Suspend]:
        if server == self.server:
            yield Suspend(server)

    def assembled(self, now: float) -> Iterator[Suspend]:
        self.batches += 1
        yield from ()

    def counts(self) -> dict[str, float]:
        return {"batches_seen": self.batches}


class Last(ProxyHook):
    """Every request goes to the generator with the highest index."""

    def place(self, request: RoutedRequest) -> GeneratorState | None:
        return self.generators[max(self.generators)] if self.generators else None


class NotesOptions(Section):
    folder: Path
    """Folder that the notes are written into."""


class Notes(EpisodeHook):
    """Writes down what each episode waited to do, in one file for each process."""

    Options = NotesOptions
    options: NotesOptions

    def join(self, ticket_id: int) -> None:
        self._note(f"{ticket_id} join")

    def arrive(self, ticket_id: int, phase: int, go_on: Call) -> None:
        self._note(f"{ticket_id} {phase}")
        self.post(go_on)

    def leave(self, ticket_id: int) -> None:
        self._note(f"{ticket_id} leave")

    def _note(self, line: str) -> None:
        with (self.options.folder / str(os.getpid())).open("a") as file:
            file.write(line + "\n")

"""A generator in virtual time: `BatchModel` (the one that the simulated engine drives with the wall clock) behind the
gate of F2, with a prefix cache and weight loads. Nothing here scans what runs, except a load that recomputes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from rl.store.recent import Recent
from rl.wire.messages import Version, WeightStatus
from rollout.generator.engines.timing import BatchModel
from rollout.generator.jobs import Gate
from rollout.simulate.clock import Clock
from rollout.simulate.scenario import Generators

NOTHING_LOADED = Version(-1, -1)
_SESSIONS_CACHED = 4096


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """What is kept of a request by the proxy's key, until it is answered."""

    key: int
    episode: object
    session: int
    version: Version
    prompt_len: int
    length: int
    """Tokens of the response."""
    prompt_hash: int
    """The hash of the group's prompt: its members begin with the same prompt."""
    oldest: int = -1
    """Version of its first token."""
    newest: int = -1
    """Version of its last token."""


class GeneratorEvents(Protocol):
    """Who hears what a generator would tell the proxy and the learner."""

    def first_token(self, generator: SimulatedGenerator, key: int, version: Version) -> None: ...

    def generated(self, generator: SimulatedGenerator, key: int, tokens: int, reason: str, version: Version) -> None:
        """`version`: of the last token."""

    def weights_status(self, generator: SimulatedGenerator, status: WeightStatus) -> None: ...


class SimulatedGenerator:
    """One incarnation of a generator. What it answers is posted to `listener` as it would go to the proxy."""

    def __init__(
        self,
        clock: Clock,
        listener: GeneratorEvents,
        index: int,
        incarnation: int,
        machine: Generators,
    ) -> None:
        self.index = index
        self.incarnation = incarnation
        self.version = NOTHING_LOADED
        self.alive = True
        self.resting = False

        self.busy_s = 0.0
        self.tokens = 0

        self._clock = clock
        self._listener = listener
        self._machine = machine
        self._model = BatchModel(machine.timing(), machine.max_num_seqs, clock.now, machine.capacity)
        self._gate: Gate[int] = Gate()

        self._requests: dict[int, SimulatedRequest] = {}
        """The requests that are held or running, by key."""
        self._cached: Recent[int] = Recent(_SESSIONS_CACHED)
        """Tokens of context by session."""

        self._prompts: set[int] = set()
        self._due = math.inf
        """Time of the wake-up that counts; earlier ones only look again."""
        self._since = clock.now

    def receive(self, request: SimulatedRequest) -> None:
        """A request from the proxy: it runs, or waits at the gate for its version."""
        self._requests[request.key] = request

        if self._gate.admit(request.version, request.key, self.version):
            self._settle()
            self._start(request)
            self._schedule()

    def abort(self, key: int) -> None:
        """Unknown keys are ignored: their answer is on its way."""
        request = self._requests.get(key)
        if request is None:
            return

        self._settle()

        if key in self._requests:
            sampled = 0
            if key in self._model:
                sampled = self._model.tokens(key)
                self._model.remove(key)
            self._answer(request, sampled, "abort")

        self._schedule()

    def wake(self, due: float) -> None:
        """The batch may have come to its next event; an outdated wake-up is ignored."""
        if self.alive and due == self._due:
            self._due = math.inf
            self._settle()
            self._schedule()

    def load(self, version: Version) -> None:
        """The bytes are there: stall, and serve the new version from now on."""
        if not self.alive:
            return

        self._settle()
        machine = self._machine
        recompute = self.resting or machine.on_update == "recompute"
        if self.resting:
            self._model.wake()
            self.resting = False
        self._model.stall(machine.load_s, recompute=recompute and self.version.n >= 0)
        self.version = version

        if machine.on_update != "keep":
            self._forget()

        self._schedule()
        self._clock.after(machine.load_s, self._loaded)

    def rest(self) -> None:
        """Decode nothing until the next load."""
        if not self.alive:
            return

        self._settle()
        self._model.stall(math.inf, recompute=False)
        self._forget()
        self.resting = True
        self._tell()

    def _forget(self) -> None:
        self._cached.clear()
        self._prompts.clear()

    def _tell(self) -> None:
        status = WeightStatus(self.index, self.incarnation, self.version, resting=self.resting)
        self._listener.weights_status(self, status)

    def _loaded(self) -> None:
        if not self.alive:
            return

        self._tell()
        self._settle()

        for key in self._gate.release(self.version):
            request = self._requests.get(key)
            if request is not None:
                self._start(request)

        self._schedule()

    def running(self) -> dict[int, int]:
        """Tokens sampled so far, by key (GeneratorStatus)."""
        self._settle()
        self._schedule()

        return {key: self._model.tokens(key) for key in self._requests if key in self._model}

    def die(self) -> None:
        self._settle()
        self.alive = False

    def _start(self, request: SimulatedRequest) -> None:
        cached = self._cached.get(request.session)
        if cached is None:
            cached = request.prompt_len if request.prompt_hash in self._prompts else 0
            self._prompts.add(request.prompt_hash)

        prefill = max(0, request.prompt_len - cached)
        self._model.add(request.key, request.prompt_len, prefill, request.length)

    def _settle(self) -> None:
        """Bring the batch up to now and answer what has ended."""
        now = self._clock.now
        if len(self._model):
            self.busy_s += now - self._since
        self._since = now

        for event in self._model.advance(now):
            if event.kind == "first_token":
                self._clock.post(self._listener.first_token, self, event.key, self.version)
            else:
                request = self._requests[event.key]
                self._answer(request, request.length, "stop")

    def _answer(self, request: SimulatedRequest, tokens: int, reason: str) -> None:
        del self._requests[request.key]
        self.tokens += tokens

        if reason == "stop":
            self._cached.use(request.session, request.prompt_len + tokens)
        self._clock.post(self._listener.generated, self, request.key, tokens, reason, self.version)

    def _schedule(self) -> None:
        """A wake-up that turns out to be early only looks again, so an event that moves away costs nothing now."""
        due = self._model.next_event()
        if due is not None and due < self._due:
            self._due = due
            self._clock.at(due, self.wake, due)

"""A generator in virtual time: `BatchModel` (the one that the simulated engine drives with the wall clock) behind the
gate of F2, with a prefix cache and weight loads. Nothing here scans what runs, except a load that recomputes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

from rl.core.messages import Version, WeightStatus
from rl.core.recent import Recent
from rollout.generator.engines.timing import BatchModel, Timing
from rollout.generator.gate import Gate
from rollout.simulate.setting import Engine

NOTHING_LOADED = Version(-1, -1)
_SESSIONS_CACHED = 4096


class Request:
    """What the shell keeps of a request by the proxy's key, until it is answered."""

    __slots__ = ("episode", "key", "length", "prompt_hash", "prompt_len", "session", "version")

    def __init__(
        self, key: int, episode: object, session: int, version: Version, prompt_len: int, length: int, prompt: int
    ) -> None:
        self.key, self.episode, self.session, self.version = key, episode, session, version
        self.prompt_len, self.length, self.prompt_hash = prompt_len, length, prompt


class Surroundings(Protocol):
    """What a generator needs of the system around it."""

    now: float

    def at(self, when: float, handle: Callable[..., None], *arguments: Any) -> None: ...

    def post(self, handle: Callable[..., None], *arguments: Any) -> None: ...

    def first_token(self, generator: Generator, key: int, version: Version) -> None: ...

    def generated(self, generator: Generator, key: int, tokens: int, reason: str) -> None: ...

    def weights_loaded(self, generator: Generator, status: WeightStatus) -> None: ...


class Generator:
    """Answers go to `world` as they would go to the proxy: first_token, finished, status."""

    def __init__(self, world: Surroundings, index: int, incarnation: int, engine: Engine, timing: Timing) -> None:
        self.world, self.index, self.incarnation = world, index, incarnation
        self.engine = engine
        self.version = NOTHING_LOADED
        self.alive = True
        self.busy_s = 0.0
        self.stalled_s = 0.0
        self.tokens = 0
        self._model = BatchModel(timing, engine.max_num_seqs, world.now)
        self._gate: Gate[int] = Gate()
        self._requests: dict[int, Request] = {}  # held or running
        self._cached: Recent[int] = Recent(_SESSIONS_CACHED)  # session -> context tokens
        self._prompts: set[int] = set()
        self._due = math.inf  # the wake-up that counts
        self._since = world.now

    def receive(self, request: Request) -> None:
        self._requests[request.key] = request
        if self._gate.admit(request.version, request.key, self.version):
            self._settle()
            self._start(request)
            self._schedule()

    def abort(self, key: int) -> None:
        request = self._requests.get(key)
        if request is None:
            return  # the answer is on its way
        self._settle()
        if key not in self._requests:
            self._schedule()
            return
        sampled = 0
        if key in self._model:
            sampled = self._model.tokens(key)
            self._model.remove(key)
        self._answer(request, sampled, "abort")
        self._schedule()

    def wake(self, due: float) -> None:
        if self.alive and due == self._due:
            self._due = math.inf
            self._settle()
            self._schedule()

    def load(self, version: Version) -> None:
        """The bytes are there: stall, and serve the new version from now on."""
        if not self.alive:
            return
        self._settle()
        engine = self.engine
        self._model.stall(engine.load_s, recompute=engine.on_update == "recompute" and self.version.n >= 0)
        self.stalled_s += engine.load_s
        self.version = version
        if engine.on_update != "keep":
            self._cached.clear()
            self._prompts.clear()
        self._schedule()
        self.world.at(self.world.now + engine.load_s, self._loaded)

    def _loaded(self) -> None:
        if not self.alive:
            return
        self.world.weights_loaded(self, WeightStatus(self.index, self.incarnation, self.version))
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

    # ------------------------------------------------------------ inside

    def _start(self, request: Request) -> None:
        cached = self._cached.get(request.session)
        if cached is None:
            cached = request.prompt_len if request.prompt_hash in self._prompts else 0
            self._prompts.add(request.prompt_hash)
        prefill = max(0, request.prompt_len - cached)
        self._model.add(request.key, request.prompt_len, prefill, request.length)

    def _settle(self) -> None:
        """Bring the batch up to now and answer what has ended."""
        world, model = self.world, self._model
        now = world.now
        if len(model):
            self.busy_s += now - self._since
        self._since = now
        for event in model.advance(now):
            if event.kind == "first_token":
                world.post(world.first_token, self, event.key, self.version)
            else:
                request = self._requests[event.key]
                self._answer(request, request.length, "stop")

    def _answer(self, request: Request, tokens: int, reason: str) -> None:
        del self._requests[request.key]
        self.tokens += tokens
        if reason == "stop":
            self._cached.use(request.session, request.prompt_len + tokens)
        self.world.post(self.world.generated, self, request.key, tokens, reason)

    def _schedule(self) -> None:
        """A wake-up that turns out to be early only looks again, so an event that moves away costs nothing now."""
        due = self._model.next_event()
        if due is not None and due < self._due:
            self._due = due
            self.world.at(due, self.wake, due)

"""Routing of generation requests as a pure state machine: events and a clock go in, actions come out.

Invariants, for any interleaving of events:

* Every request is answered exactly once, unless its client is dead: by its generator, or by the proxy.
* Nothing is sent to a generator that is not up. Work of a generator is sent again only after its death is certain (the
  supervisor has fenced it), and late messages of a dead incarnation change nothing.
* What is sent fits into the KV tokens of its generator that are not reserved, and into its sequence limit; the rest
  waits here by (priority, arrival). A live request reserves its prompt and what `kv_admission` says of its response.
* Tokens reported for a session are those its generators reported; `lost` are those not delivered when they died.

Routing cost = outstanding work of the generator + prefill tokens that are not in its cache, in tokens. Outstanding work
of a request is its uncached prefill until the first token, then what remains of an average response. Only the least
loaded generator and those holding a cached prefix (the session's, the same prompt's) can be the cheapest. Replicas of a
prompt spread as soon as a generator's load outweighs the prefill that sharing saves.
The gate (F2) plays no part here: generators hold requests for a version they have not loaded.

    queued ──SendTo──▶ on a generator ──finished──▶ answered
       ▲                      │ generator died
       └──────────────────────┘  (aborted, or died too often: answered)
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from rl.config.hooks import make_hooks
from rl.config.section import Named
from rl.wire.messages import ReportsLost, StillSampling, Usage
from rollout.proxy.actions import AbortAt, Action, Client, Forget, GoOn, Rename, Reply, ReportFirstToken, SendTo
from rollout.proxy.balance import LoadTree, PriorityQueue
from rollout.proxy.hooks import ProxyHook
from rollout.proxy.state import Admission, GeneratorState, KvAdmission, Limits, PrefixIndex, RoutedRequest


class ProxyCore:
    """`now` is in seconds on any clock; every event method returns the actions to carry out, in order.

    * `cache_survives_update`: prefix caches outlive a weight update (`on_update=keep`).
    * `hooks`: as `rollout.hooks` names them; those of the proxy may place requests (`hooks.py`).
    * `max_deaths`: how many generators may die under one request before it is answered with an error.
    * `max_overtakes`: how many requests with a cached prefix may pass the head of the queue (no starvation).
    * `kv_admission`: what a request reserves (`Admission`); with `expected` engines must pre-empt.
    """

    def __init__(
        self,
        *,
        cache_survives_update: bool = False,
        hooks: Sequence[Named] = (),
        max_deaths: int = 3,
        max_overtakes: int = 16,
        kv_admission: KvAdmission = "whole",
    ) -> None:
        self._cache_survives_update = cache_survives_update
        self._max_deaths = max_deaths
        self._max_overtakes = max_overtakes

        self._generators: dict[int, GeneratorState] = {}
        self._fenced: dict[int, int] = {}  # highest incarnation known to be dead
        self._limits = Limits()

        self._clients: dict[Client, dict[int, RoutedRequest]] = {}
        self._dead_clients: set[Client] = set()
        self._requests: dict[int, RoutedRequest] = {}
        self._queue: PriorityQueue[RoutedRequest] = PriorityQueue()
        self._tree = LoadTree()
        self._prefixes = PrefixIndex()
        self._admission = Admission(kv_admission)
        self._hooks: list[ProxyHook] = make_hooks("proxy", hooks, self._generators, self._prefixes)
        self._actions: list[Action] = []  # of the event at hand

        self.next_key = 1
        self.queue_depth = 0
        self.ignored = 0  # late, duplicate or unknown messages

    # ------------------------------------------------------------ generators

    def generator_up(
        self, now: float, index: int, incarnation: int, kv_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> list[Action]:
        """A new incarnation exists only after the old one was fenced, so it also reports that death."""
        known = self._generators.get(index)
        if incarnation <= self._fenced.get(index, -1) or (known is not None and incarnation <= known.incarnation):
            return self._ignore()
        if known is not None:
            self._fence(now, index, known.incarnation)

        generator = self._generators[index] = GeneratorState(index, incarnation, kv_tokens, max_num_seqs)
        self._limits.up(index, kv_tokens, max_model_len)
        self._queue.recall()
        self._update(generator)
        return self._drain(now)

    def generator_died(self, now: float, index: int, incarnation: int) -> list[Action]:
        """Fenced: what it held is sent again, in its old place in the queue, without what it had delivered."""
        self._fence(now, index, incarnation)
        return self._take_actions()

    def generator_again(self, now: float, index: int, incarnation: int, requests: Collection[int]) -> list[Action]:
        """A generator's connection broke and was made again. It holds these requests; others are sent again, maybe
        elsewhere."""
        generator = self._generators.get(index)
        if generator is None or generator.incarnation != incarnation:
            return self._ignore()

        self._actions.append(ReportsLost())
        held = set(requests)
        unwanted = [key for key in requests if key not in generator.live or generator.live[key].aborted]
        self._actions += [AbortAt(index, key) for key in unwanted]

        for key in sorted(generator.live.keys() - held):
            request = generator.live[key]
            generator.release(request)
            request.key = self.next_key
            self.next_key += 1
            self._requests[request.key] = self._requests.pop(key)
            self._actions += [AbortAt(index, key), Rename(key, request.key)]
            self._take_back(now, request)
        self._update(generator)
        return self._drain(now)

    def first_token(self, now: float, index: int, incarnation: int, key: int) -> list[Action]:
        request = self._running(index, incarnation, key)
        if request is None:
            return []

        assert request.generator is not None
        request.has_sampled(max(1, request.tokens))
        self._update(request.generator)
        if request.train and not request.kept and not self._prefixes.knows_session(request.session):
            return [ReportFirstToken(key, request.session)]
        return []

    def delivered(self, key: int, tokens: int) -> tuple[Client, int]:
        """The first tokens of a running request are here: its generator's death does not lose them. Whose they are."""
        request = self._requests[key]
        request.delivered = tokens
        return request.client, request.request_id

    def runs(self, index: int, incarnation: int, key: int) -> bool:
        """Whether this incarnation runs the request `key`."""
        generator = self._generators.get(index)
        return generator is not None and generator.incarnation == incarnation and key in generator.live

    def status(
        self, now: float, index: int, incarnation: int, running: dict[int, int], version: Hashable = None
    ) -> list[Action]:
        """Tokens sampled so far per running request: what remains of its work."""
        generator = self._generators.get(index)
        if generator is None or generator.incarnation != incarnation:
            return self._ignore()

        if version != generator.version:
            generator.version = version
            if not self._cache_survives_update:
                generator.cache_timeline += 1
                generator.prompts.clear()

        grown = [key for key in running if key in generator.live and running[key] > generator.live[key].tokens]
        for key in grown:
            generator.live[key].has_sampled(running[key])
        self._update(generator)
        return [StillSampling()] if grown else []

    def finished(
        self, now: float, index: int, incarnation: int, key: int, tokens_generated: int, finish_reason: str
    ) -> list[Action]:
        """A generator's one answer; `tokens_generated` counts everything it sampled for this request."""
        request = self._running(index, incarnation, key)
        if request is None:
            return []

        generator = request.generator
        assert generator is not None
        generator.release(request)
        self._update(generator)

        if request.train and tokens_generated:
            self._actions.append(Usage(request.session, tokens_generated, lost=False))
        self._prefixes.finished(request, generator, request.prompt_len + tokens_generated)
        if finish_reason in ("stop", "length"):
            self._admission.ended(request.kept + tokens_generated)

        self._answer(request, finish_reason, forward=True)
        return self._drain(now, freed=generator)

    # ------------------------------------------------------------ clients

    def add(
        self,
        now: float,
        client: Client,
        request_id: int,
        *,
        session: int,
        kind: str,
        prompt_len: int,
        max_tokens: int,
        priority: int = 0,
        prompt_hash: int | None = None,
    ) -> list[Action]:
        """A new request under the key `next_key`. Equal `prompt_hash`es are equal prompts (a hint)."""
        if client in self._dead_clients or request_id in self._clients.setdefault(client, {}):
            return self._ignore()

        key = self.next_key
        self.next_key += 1
        train = kind == "train"
        need = prompt_len + max_tokens
        request = RoutedRequest(
            key, client, request_id, session, train, prompt_len, max_tokens, priority, prompt_hash, now, need
        )
        self._requests[key] = request
        self._clients[client][request_id] = request

        if error := self._limits.refuse(request):
            self._answer(request, "error", error)
            return self._take_actions()
        self._enqueue(now, request)
        return self._drain(now)

    def abort(self, now: float, client: Client, request_id: int) -> list[Action]:
        """A queued request is answered at once, one in flight when its generator answers (or dies)."""
        request = self._clients.get(client, {}).get(request_id)
        if request is None or request.aborted:
            return self._ignore()
        self._abort(now, request)
        return self._drain(now)

    def client_died(self, now: float, client: Client) -> list[Action]:
        """Abort the requests of a client that died; their tokens are still reported, their answers are for nobody."""
        self._dead_clients.add(client)
        for request in self._clients.pop(client, {}).values():
            request.orphan = True
            if not request.aborted:
                self._abort(now, request)
        return self._drain(now)

    # ------------------------------------------------------------ views

    def knows_session(self, session: int) -> bool:
        """A turn of this session has been answered: it has a cached prefix, so the hash of its prompt is of no use."""
        return self._prefixes.knows_session(session)

    @property
    def live_requests(self) -> int:
        """Queued or on a generator."""
        return len(self._requests)

    @property
    def in_flight(self) -> int:
        return len(self._requests) - self.queue_depth

    def loads(self) -> dict[int, tuple[int, int, int]]:
        """Per generator that is up: outstanding work, reserved KV tokens, live requests."""
        return {index: (each.load, each.reserved, len(each.live)) for index, each in self._generators.items()}

    # ------------------------------------------------------------ inside

    def _ignore(self) -> list[Action]:
        self.ignored += 1
        return []

    def _take_actions(self) -> list[Action]:
        actions = self._actions
        self._actions = []
        return actions

    def _running(self, index: int, incarnation: int, key: int) -> RoutedRequest | None:
        if self.runs(index, incarnation, key):
            return self._requests[key]
        self.ignored += 1
        return None

    def _fence(self, now: float, index: int, incarnation: int) -> None:
        self._fenced[index] = max(incarnation, self._fenced.get(index, -1))
        generator = self._generators.get(index)
        if generator is None or generator.incarnation > incarnation:
            return

        del self._generators[index]
        generator.alive = False
        self._limits.down(self._generators.values())
        self._update(generator)

        for request in generator.live.values():
            request.deaths += 1
            self._take_back(now, request)
        generator.live.clear()
        self._send_queued(now)

    def _take_back(self, now: float, request: RoutedRequest) -> None:
        """Take a request back from a generator that has died or lost it."""
        kept, lost = request.leave_generator()
        if kept:
            self._actions.append(GoOn(request.key, kept))
        reports = (Usage(request.session, *each) for each in ((kept, False), (lost, True)))
        self._actions += [report for report in reports if request.train and report.tokens]

        if request.aborted:
            self._answer(request, "abort")
        elif request.deaths >= self._max_deaths:
            self._answer(request, "error", f"{request.deaths} generators died running this request")
        else:
            self._enqueue(now, request)

    def _enqueue(self, now: float, request: RoutedRequest) -> None:
        request.queued = True
        request.since = now
        self.queue_depth += 1
        self._queue.push(request)
        cached_at = self._prefixes.of_session(request)
        if cached_at is not None and cached_at.alive:
            cached_at.cached_here.push(request)

    def _dequeue(self, now: float, request: RoutedRequest) -> None:
        request.queued = False
        request.queued_s += now - request.since
        self.queue_depth -= 1

    def _abort(self, now: float, request: RoutedRequest) -> None:
        request.aborted = True
        if request.generator is not None:
            self._actions.append(AbortAt(request.generator.index, request.key))
        else:
            self._dequeue(now, request)
            self._answer(request, "abort")

    def _answer(self, request: RoutedRequest, reason: str, error: str = "", *, forward: bool = False) -> None:
        del self._requests[request.key]
        if request.orphan:
            self._actions.append(Forget(request.key))
            return
        client = request.client
        del self._clients[client][request.request_id]
        reply = Reply(client, request.request_id, request.key, forward, reason, error, request.queued_s)
        self._actions.append(reply)

    def _drain(self, now: float, freed: GeneratorState | None = None) -> list[Action]:
        """The end of an event: send what can be sent, and return all its actions."""
        self._send_queued(now, freed)
        return self._take_actions()

    def _send_queued(self, now: float, freed: GeneratorState | None = None) -> None:
        """Send from the head of the queue until it fits nowhere.

        A larger request at the head is not passed by smaller ones, or it could starve. There are two exceptions. On the
        generator that was just freed, a request that saves more prefill there goes first, at most `max_overtakes`
        times. What only a dead generator could take stands aside until a generator comes up.
        """
        while (head := self._queue.head()) is not None:
            if error := self._limits.refuse(head):
                self._dequeue(now, head)
                self._answer(head, "error", error)
                continue

            if freed is not None and (overtaker := self._overtaker(freed, head)) is not None:
                head.overtaken += 1
                self._send(now, overtaker, freed)
                continue

            generator = self._place(head)
            if generator is not None:
                self._send(now, head, generator)
            elif head.whole > self._limits.largest_up > 0:
                self._queue.set_head_aside()
            else:
                return

    def _place(self, request: RoutedRequest) -> GeneratorState | None:
        """The least loaded generator, or one that holds a prefix of the prompt; None if there is no room."""
        self._admission.reserve(request)
        for hook in self._hooks:
            if (placed := hook.place(request)) is not None:
                return placed

        index = self._tree.best(request.need)
        if index is not None and not self._generators[index].takes(request):  # alone it would not fit
            index = self._tree.best(request.whole)
        if index is None:
            return None

        prefixes = self._prefixes
        chosen = self._generators[index]
        cost = chosen.load - prefixes.cached_tokens(request, chosen)
        for generator in (prefixes.of_prompt(request), prefixes.of_session(request)):
            if generator is not None and generator is not chosen and generator.takes(request):
                its_cost = generator.load - prefixes.cached_tokens(request, generator)
                if its_cost <= cost:
                    chosen = generator
                    cost = its_cost
        return chosen

    def _overtaker(self, freed: GeneratorState, head: RoutedRequest) -> RoutedRequest | None:
        """A waiting request that saves more prefill on the freed generator than the head of the queue."""
        request = freed.cached_here.head()
        if request is None or request is head or head.overtaken >= self._max_overtakes:
            return None

        self._admission.reserve(request)
        saves_more = self._prefixes.cached_tokens(request, freed) > self._prefixes.cached_tokens(head, freed)
        return request if saves_more and freed.takes(request) else None

    def _send(self, now: float, request: RoutedRequest, generator: GeneratorState) -> None:
        self._dequeue(now, request)
        request.expected = self._admission.expected(request)
        request.work = request.prompt_len - self._prefixes.cached_tokens(request, generator) + request.expected

        request.generator = generator
        generator.live[request.key] = request
        generator.reserved += request.need
        generator.load += request.work
        self._update(generator)

        self._prefixes.sent(request, generator)
        self._actions.append(SendTo(generator.index, request.key))

    def _update(self, generator: GeneratorState) -> None:
        self._tree.set(generator.index, generator.load, generator.room)

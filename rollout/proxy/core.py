"""Routing of generation requests as a pure state machine: events and a clock go in, actions come out.

Invariants, for any interleaving of events:

* Every request is answered exactly once, unless its client is dead: by its generator, or by the proxy
  (aborted while queued, aborted on a generator that died, or it can never fit).
* Nothing is sent to a generator that is not up; work of a generator is sent again only after its death
  is certain (the supervisor has fenced it), and late messages of a dead incarnation change nothing.
* The KV tokens reserved on a generator (prompt + max_tokens of its live requests) never exceed its
  capacity, nor its live requests its sequence limit; the rest waits here by (priority, arrival).
* Tokens reported for a session are those its generators reported, `lost` ones when they died.

Routing cost = outstanding work of the generator + prefill tokens that are not in its cache, in tokens.
Outstanding work of a request is its uncached prefill until the first token, then what
remains of an average response. Only the least loaded generator and those holding a cached prefix (the session's,
the same prompt's) can be the cheapest, so only these are compared. Replicas of a prompt therefore spread as
soon as a generator's load outweighs the prefill that sharing would save. The gate (F2) plays no part here:
generators hold requests for a version they have not loaded.

    queued ──SendTo──▶ on a generator ──finished──▶ answered
       ▲                      │ generator died
       └──────────────────────┘  (aborted, or died too often: answered)
"""

from __future__ import annotations

from collections.abc import Hashable

from rollout.proxy.actions import AbortAt, Action, Client, Forget, Reply, ReportFirstToken, ReportUsage, SendTo
from rollout.proxy.balance import LoadTree, PriorityQueue
from rollout.proxy.prefixes import PrefixIndex
from rollout.proxy.state import GeneratorState, RoutedRequest


class ProxyCore:
    """`now` is in seconds on any clock; every event method returns the actions to carry out, in order.

    cache_survives_update: prefix caches outlive a weight update (`on_update=keep`).
    pin_prompts: baseline without prompt replication: every response of a prompt (equal hashes) goes to the generator
        of its first one and waits in its engine, whatever is free elsewhere; these may exceed its KV capacity.
    max_deaths: generators that may die under one request before it is answered with an error.
    max_overtakes: requests with a cached prefix that may pass the head of the queue (no starvation).
    remembered: sessions, and prompts, whose place in a cache is known.
    """

    def __init__(
        self,
        *,
        cache_survives_update: bool = False,
        pin_prompts: bool = False,
        max_deaths: int = 3,
        max_overtakes: int = 16,
        remembered: int = 65_536,
    ) -> None:
        self._cache_survives_update = cache_survives_update
        self._pin_prompts = pin_prompts
        self._max_deaths = max_deaths
        self._max_overtakes = max_overtakes

        self._generators: dict[int, GeneratorState] = {}
        self._kv_tokens: dict[int, int] = {}  # of each generator's last incarnation
        self._fenced: dict[int, int] = {}  # highest incarnation known to be dead
        self._largest_kv = 0
        self._max_model_len = 0

        self._clients: dict[Client, dict[int, RoutedRequest]] = {}
        self._dead_clients: set[Client] = set()
        self._requests: dict[int, RoutedRequest] = {}
        self._queue: PriorityQueue[RoutedRequest] = PriorityQueue()
        self._tree = LoadTree()
        self._prefixes = PrefixIndex(remembered)
        self._mean_response = 0.0
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
        self._kv_tokens[index] = kv_tokens
        self._largest_kv = max(self._kv_tokens.values())
        self._max_model_len = max_model_len  # one configuration: equal for all
        self._update(generator)
        return self._drain(now)

    def generator_died(self, now: float, index: int, incarnation: int) -> list[Action]:
        """Fenced: what it held is sent again, in its old place in the queue; what it had sampled is lost."""
        self._fence(now, index, incarnation)
        return self._take_actions()

    def first_token(self, now: float, index: int, incarnation: int, key: int) -> list[Action]:
        request = self._running(index, incarnation, key)
        if request is None:
            return []

        assert request.generator is not None
        request.has_sampled(max(1, request.tokens))
        self._update(request.generator)
        if request.train and not self._prefixes.knows_session(request.session):
            return [ReportFirstToken(key, request.session)]
        return []

    def status(
        self, now: float, index: int, incarnation: int, running: dict[int, int], version: Hashable = None
    ) -> list[Action]:
        """Tokens sampled so far per running request: what remains of its work, and what its death would lose."""
        generator = self._generators.get(index)
        if generator is None or generator.incarnation != incarnation:
            return self._ignore()

        if version != generator.version:
            generator.version = version
            if not self._cache_survives_update:
                generator.cache_epoch += 1
                generator.prompts.clear()

        for key, tokens in running.items():
            request = generator.live.get(key)
            if request is not None and tokens > request.tokens:
                request.has_sampled(tokens)
        self._update(generator)
        return []

    def finished(
        self, now: float, index: int, incarnation: int, key: int, tokens_generated: int, finish_reason: str
    ) -> list[Action]:
        """A generator's one answer; `tokens_generated` counts everything it sampled for this request."""
        request = self._running(index, incarnation, key)
        if request is None:
            return []

        generator = request.generator
        assert generator is not None
        del generator.live[key]
        generator.reserved -= request.need
        generator.load -= request.work
        self._update(generator)

        if request.train and tokens_generated:
            self._actions.append(ReportUsage(request.session, tokens_generated, lost=False))
        self._prefixes.finished(request, generator, request.prompt_len + tokens_generated)
        if finish_reason in ("stop", "length"):
            old = self._mean_response
            self._mean_response = old + 0.02 * (tokens_generated - old) if old else float(tokens_generated)

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

        if error := self._never_fits(request):
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
        """Its requests are aborted; their tokens are still reported, their answers are for nobody."""
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
        generator = self._generators.get(index)
        request = generator.live.get(key) if generator is not None and generator.incarnation == incarnation else None
        if request is None:
            self.ignored += 1
        return request

    def _fence(self, now: float, index: int, incarnation: int) -> None:
        self._fenced[index] = max(incarnation, self._fenced.get(index, -1))
        generator = self._generators.get(index)
        if generator is None or generator.incarnation > incarnation:
            return

        del self._generators[index]
        generator.alive = False
        self._update(generator)

        for request in generator.live.values():
            if request.train and request.tokens:
                self._actions.append(ReportUsage(request.session, request.tokens, lost=True))
            request.generator = None
            request.tokens = 0
            request.deaths += 1

            if request.aborted:
                self._answer(request, "abort")
            elif request.deaths >= self._max_deaths:
                self._answer(request, "error", f"{request.deaths} generators died running this request")
            else:
                self._enqueue(now, request)

        generator.live.clear()
        self._send_queued(now)

    def _never_fits(self, request: RoutedRequest) -> str:
        if request.prompt_len < 1 or request.max_tokens < 1:
            return f"empty request: prompt of {request.prompt_len} tokens, max_tokens={request.max_tokens}"
        if not self._kv_tokens:
            return ""  # no generator has said its limits yet

        for limit, name in ((self._max_model_len, "generator.max_model_len"), (self._largest_kv, "KV cache")):
            if request.need > limit:
                asked = f"prompt of {request.prompt_len} tokens + max_tokens={request.max_tokens}"
                return f"{asked} exceeds the {name} of {limit} tokens"
        return ""

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

        A larger request at the head is not passed by smaller ones, or it could starve. Exception, bounded by
        `max_overtakes`: on the generator that was just freed, a request that saves more prefill there goes first.
        """
        while (head := self._queue.head()) is not None:
            if error := self._never_fits(head):
                self._dequeue(now, head)
                self._answer(head, "error", error)
                continue

            overtaker = self._overtaker(freed, head) if freed is not None else None
            if overtaker is not None and freed is not None:
                head.overtaken += 1
                self._send(now, overtaker, freed)
                continue

            generator = self._choose(head)
            if generator is None:
                return
            self._send(now, head, generator)

    def _overtaker(self, freed: GeneratorState, head: RoutedRequest) -> RoutedRequest | None:
        request = freed.cached_here.head()
        if request is None or request is head or head.overtaken >= self._max_overtakes:
            return None
        saves_more = self._prefixes.cached_tokens(request, freed) > self._prefixes.cached_tokens(head, freed)
        return request if saves_more and freed.room >= request.need else None

    def _choose(self, request: RoutedRequest) -> GeneratorState | None:
        """The cheapest generator with room: the least loaded one, or one that holds a prefix of the prompt."""
        prefixes = self._prefixes
        same_prompt = prefixes.of_prompt(request)
        if self._pin_prompts and same_prompt is not None and same_prompt.alive:
            return same_prompt

        index = self._tree.best(request.need)
        if index is None:
            return None

        chosen = self._generators[index]
        cost = chosen.load - prefixes.cached_tokens(request, chosen)
        for generator in (same_prompt, prefixes.of_session(request)):
            if generator is not None and generator is not chosen and generator.room >= request.need:
                its_cost = generator.load - prefixes.cached_tokens(request, generator)
                if its_cost <= cost:
                    chosen = generator
                    cost = its_cost
        return chosen

    def _send(self, now: float, request: RoutedRequest, generator: GeneratorState) -> None:
        self._dequeue(now, request)
        mean = round(self._mean_response)
        request.expected = max(1, min(request.max_tokens, mean)) if mean else request.max_tokens
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

"""Routing of generation requests as a pure state machine: events and a clock go in, actions come out.

Invariants, for any interleaving of events:

* Every request is answered exactly once, unless its client is dead: by its generator, or by the proxy
  (aborted while queued, aborted on a generator that died, or it can never fit).
* Nothing is sent to a generator that is not up; work of a generator is sent again only after its death
  is certain (the supervisor has fenced it), and late messages of a dead incarnation change nothing.
* The KV tokens reserved on a generator (prompt + max_tokens of its live requests) never exceed its
  capacity, nor its live requests its sequence limit; the rest waits here by (priority, arrival).
* Tokens reported for a session are those its generators reported, `lost` ones when they died.

Routing cost = outstanding work of the generator + prefill tokens that are not in its cache, in tokens
(DESIGN section 4). Outstanding work of a request is its uncached prefill until the first token, then what
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

from rl.core.recent import Recent
from rollout.proxy.balance import Line, LoadTree
from rollout.proxy.state import (
    AbortAt,
    Action,
    Client,
    Forget,
    Generator,
    Home,
    Reply,
    ReportFirstToken,
    ReportUsage,
    Request,
    SendTo,
)


class ProxyCore:
    """`now` is in seconds on any clock; every event method returns the actions to carry out, in order.

    cache_survives_update: prefix caches outlive a weight update (`on_update=keep`).
    pin_prompts: baseline without prompt replication: every response of a prompt (equal hashes) goes to the generator
        of its first one and waits in its engine, whatever is free elsewhere; these may exceed its KV capacity.
    max_deaths: generators that may die under one request before it is answered with an error.
    max_overtakes: requests with a cached prefix that may pass the head of the queue (no starvation).
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
        self._generators: dict[int, Generator] = {}
        self._kv_tokens: dict[int, int] = {}  # of each generator's last incarnation
        self._fenced: dict[int, int] = {}  # highest incarnation known to be dead
        self._largest_kv = self._max_model_len = 0
        self._clients: dict[Client, dict[int, Request]] = {}
        self._dead_clients: set[Client] = set()
        self._requests: dict[int, Request] = {}
        self._line: Line[Request] = Line()
        self._tree = LoadTree()
        self._sessions: Recent[Home] = Recent(remembered)
        self._prompts: Recent[Generator] = Recent(remembered)  # where a prompt was sent last
        self.next_key = 1
        self._mean_response = 0.0
        self.queue_depth = 0
        self.ignored = 0  # late, duplicate or unknown messages

    # ------------------------------------------------------------ generators

    def generator_up(
        self, now: float, index: int, incarnation: int, kv_tokens: int, max_num_seqs: int, max_model_len: int
    ) -> list[Action]:
        """A new incarnation exists only after the old one was fenced, so it also reports that death."""
        known = self._generators.get(index)
        if incarnation <= self._fenced.get(index, -1) or (known is not None and incarnation <= known.incarnation):
            self.ignored += 1
            return []
        actions = self.generator_died(now, index, known.incarnation) if known is not None else []
        self._generators[index] = Generator(index, incarnation, kv_tokens, max_num_seqs)
        self._kv_tokens[index] = kv_tokens
        self._largest_kv = max(self._kv_tokens.values())
        self._max_model_len = max_model_len  # one configuration: equal for all
        self._update(self._generators[index])
        self._drain(now, actions)
        return actions

    def generator_died(self, now: float, index: int, incarnation: int) -> list[Action]:
        """Fenced: what it held is sent again, in its old place in the queue; what it had sampled is lost."""
        self._fenced[index] = max(incarnation, self._fenced.get(index, -1))
        generator = self._generators.get(index)
        if generator is None or generator.incarnation > incarnation:
            return []
        del self._generators[index]
        generator.alive = False
        self._update(generator)
        actions: list[Action] = []
        for request in generator.live.values():
            if request.train and request.tokens:
                actions.append(ReportUsage(request.session, request.tokens, lost=True))
            request.generator, request.tokens = None, 0
            request.deaths += 1
            if request.aborted:
                self._answer(request, actions, "abort")
            elif request.deaths >= self._max_deaths:
                self._answer(request, actions, "error", f"{request.deaths} generators died running this request")
            else:
                self._enqueue(now, request)
        generator.live.clear()
        self._drain(now, actions)
        return actions

    def first_token(self, now: float, index: int, incarnation: int, key: int) -> list[Action]:
        request = self._running(index, incarnation, key)
        if request is None:
            return []
        assert request.generator is not None
        self._sampled(request, max(1, request.tokens))
        self._update(request.generator)
        if request.train and request.session not in self._sessions:
            return [ReportFirstToken(key, request.session)]
        return []

    def status(
        self, now: float, index: int, incarnation: int, running: dict[int, int], version: Hashable = None
    ) -> list[Action]:
        """Tokens sampled so far per running request: what remains of its work, and what its death would lose."""
        generator = self._generators.get(index)
        if generator is None or generator.incarnation != incarnation:
            self.ignored += 1
            return []
        if version != generator.version:
            generator.version = version
            if not self._cache_survives_update:
                generator.cache_epoch += 1
                generator.prompts.clear()
        for key, tokens in running.items():
            request = generator.live.get(key)
            if request is not None and tokens > request.tokens:
                self._sampled(request, tokens)
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
        actions: list[Action] = []
        if request.train and tokens_generated:
            actions.append(ReportUsage(request.session, tokens_generated, lost=False))
        context = request.prompt_len + tokens_generated
        self._sessions.use(request.session, Home(generator, generator.cache_epoch, context))
        if finish_reason in ("stop", "length"):
            old = self._mean_response
            self._mean_response = old + 0.02 * (tokens_generated - old) if old else float(tokens_generated)
        self._answer(request, actions, finish_reason, forward=True)
        self._drain(now, actions, freed=generator)
        return actions

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
            self.ignored += 1
            return []
        request = Request(
            self.next_key, client, request_id, session, kind == "train", prompt_len, max_tokens, priority,
            prompt_hash, since=now, need=prompt_len + max_tokens,
        )  # fmt: skip
        self.next_key += 1
        self._requests[request.key] = self._clients[client][request_id] = request
        actions: list[Action] = []
        error = self._never_fits(request)
        if error:
            self._answer(request, actions, "error", error)
            return actions
        self._enqueue(now, request)
        self._drain(now, actions)
        return actions

    def abort(self, now: float, client: Client, request_id: int) -> list[Action]:
        """A queued request is answered at once, one in flight when its generator answers (or dies)."""
        request = self._clients.get(client, {}).get(request_id)
        if request is None or request.aborted:
            self.ignored += 1
            return []
        actions: list[Action] = []
        self._abort(now, request, actions)
        self._drain(now, actions)
        return actions

    def client_died(self, now: float, client: Client) -> list[Action]:
        """Its requests are aborted; their tokens are still reported, their answers are for nobody."""
        self._dead_clients.add(client)
        actions: list[Action] = []
        for request in list(self._clients.get(client, {}).values()):
            request.orphan = True
            if not request.aborted:
                self._abort(now, request, actions)
        self._clients.pop(client, None)
        self._drain(now, actions)
        return actions

    # ------------------------------------------------------------ views

    def knows_session(self, session: int) -> bool:
        """A turn of this session has been answered: it has a home, so the hash of its prompt is of no use."""
        return session in self._sessions

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

    def _running(self, index: int, incarnation: int, key: int) -> Request | None:
        generator = self._generators.get(index)
        request = generator.live.get(key) if generator is not None and generator.incarnation == incarnation else None
        if request is None:
            self.ignored += 1
        return request

    def _never_fits(self, request: Request) -> str:
        if request.prompt_len < 1 or request.max_tokens < 1:
            return f"empty request: prompt of {request.prompt_len} tokens, max_tokens={request.max_tokens}"
        if not self._kv_tokens:
            return ""  # no generator has said its limits yet
        for limit, name in ((self._max_model_len, "generator.max_model_len"), (self._largest_kv, "KV cache")):
            if request.need > limit:
                return (
                    f"prompt of {request.prompt_len} tokens + max_tokens={request.max_tokens} "
                    f"exceeds the {name} of {limit} tokens"
                )
        return ""

    def _enqueue(self, now: float, request: Request) -> None:
        request.queued, request.since = True, now
        self.queue_depth += 1
        self._line.push(request)
        home = self._sessions.get(request.session)
        if home is not None and home.generator.alive:
            home.generator.loyal.push(request)

    def _dequeue(self, now: float, request: Request) -> None:
        request.queued = False
        request.queued_s += now - request.since
        self.queue_depth -= 1

    def _abort(self, now: float, request: Request, actions: list[Action]) -> None:
        request.aborted = True
        if request.generator is not None:
            actions.append(AbortAt(request.generator.index, request.key))
        else:
            self._dequeue(now, request)
            self._answer(request, actions, "abort")

    def _answer(
        self, request: Request, actions: list[Action], reason: str, error: str = "", *, forward: bool = False
    ) -> None:
        del self._requests[request.key]
        if request.orphan:
            actions.append(Forget(request.key))
            return
        del self._clients[request.client][request.request_id]
        actions.append(
            Reply(
                request.client, request.request_id, request.key, request.session, forward, reason, error,
                request.queued_s,
            )
        )  # fmt: skip

    def _drain(self, now: float, actions: list[Action], freed: Generator | None = None) -> None:
        """Send from the head of the queue until it fits nowhere.

        A larger request at the head is not passed by smaller ones, or it could starve. Exception, bounded by
        `max_overtakes`: on the generator that was just freed, a request that saves more prefill there goes first.
        """
        while (head := self._line.head()) is not None:
            error = self._never_fits(head)
            if error:
                self._dequeue(now, head)
                self._answer(head, actions, "error", error)
                continue
            loyal = self._loyal(freed, head) if freed is not None else None
            if loyal is not None and freed is not None:
                head.overtaken += 1
                self._place(now, loyal, freed, actions)
                continue
            generator = self._choose(head)
            if generator is None:
                return
            self._place(now, head, generator, actions)

    def _loyal(self, freed: Generator, head: Request) -> Request | None:
        request = freed.loyal.head()
        if request is None or request is head or head.overtaken >= self._max_overtakes:
            return None
        saves_more = self._cached(request, freed) > self._cached(head, freed)
        return request if saves_more and freed.has_room(request.need) else None

    def _choose(self, request: Request) -> Generator | None:
        """The cheapest generator with room: the least loaded one, or one that holds a prefix of the prompt."""
        if self._pin_prompts and request.prompt_hash is not None:
            pinned = self._prompts.get(request.prompt_hash)
            if pinned is not None and pinned.alive:
                return pinned
        index = self._tree.best(request.need)
        if index is None:
            return None
        chosen = self._generators[index]
        cost = chosen.load - self._cached(request, chosen)
        home = self._sessions.get(request.session)
        twin = self._prompts.get(request.prompt_hash) if request.prompt_hash is not None else None
        for generator in (twin, home.generator if home is not None else None):
            if generator is not None and generator is not chosen and generator.has_room(request.need):
                its_cost = generator.load - self._cached(request, generator)
                if its_cost <= cost:
                    chosen, cost = generator, its_cost
        return chosen

    def _cached(self, request: Request, generator: Generator) -> int:
        """Prompt tokens that this generator need not prefill."""
        if request.prompt_hash in generator.prompts:
            return request.prompt_len
        home = self._sessions.get(request.session)
        if home is None or home.generator is not generator or home.cache_epoch != generator.cache_epoch:
            return 0
        return min(home.tokens, request.prompt_len)

    def _place(self, now: float, request: Request, generator: Generator, actions: list[Action]) -> None:
        self._dequeue(now, request)
        mean = round(self._mean_response)
        request.expected = max(1, min(request.max_tokens, mean)) if mean else request.max_tokens
        request.work = request.prompt_len - self._cached(request, generator) + request.expected
        request.generator = generator
        generator.live[request.key] = request
        generator.reserved += request.need
        generator.load += request.work
        self._update(generator)
        if request.prompt_hash is not None:
            self._prompts.use(request.prompt_hash, generator)
            generator.prompts.use(request.prompt_hash, None)
        actions.append(SendTo(generator.index, request.key))

    @staticmethod
    def _sampled(request: Request, tokens: int) -> None:
        """Prefill is done; a response longer than expected counts as nearly finished."""
        assert request.generator is not None
        request.tokens = tokens
        work = max(1, request.expected - tokens)
        request.generator.load += work - request.work
        request.work = work

    def _update(self, generator: Generator) -> None:
        full = not generator.alive or len(generator.live) >= generator.max_num_seqs
        room = -1 if full else generator.kv_tokens - generator.reserved
        self._tree.set(generator.index, generator.load, room)

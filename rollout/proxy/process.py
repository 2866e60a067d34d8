"""The proxy process: moves requests and answers between environment servers and generators.

    python -m rollout.proxy.process --run DIR

`ProxyCore` decides. This shell keeps each request's message until it is answered, so that it can be sent again after a
generator's death. It keeps it by the core's key: request ids are unique per client only, keys are unique here. After
the proxy's own death the clients ask the next one again. Array frames are passed on as they came. No torch; one plain
poll loop that drains every socket in turn.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections import defaultdict
from typing import Any

import zmq
from msgspec.structs import replace

from rl.wire import messages
from rl.wire.columns import ONE_TURN, masked_columns
from rl.wire.messages import Message, ProtocolError
from rl.wire.process import Process, leave
from rl.wire.receiving import Malformed, Receiver
from rl.wire.run import context_from_command_line
from rl.wire.sockets import PeerGone, open_socket, send_all
from rollout.broker.validation import vocabulary_of
from rollout.proxy.actions import AbortAt, Action, Forget, GoOn, Rename, Reply, ReportFirstToken, SendTo
from rollout.proxy.continuations import Continuations
from rollout.proxy.core import ProxyCore
from rollout.proxy.requests import check_request

_KEYS = 1 << 40  # of one incarnation: what generators still run for a dead one has another key


class Proxy:
    """Sockets, payloads and addresses around a `ProxyCore`."""

    def __init__(self, process: Process) -> None:
        run = process.run
        self._process = process
        self._core = ProxyCore(
            cache_survives_update=run.config.generator.on_update == "keep",
            hooks=run.config.rollout.hooks,
            kv_admission="expected",
        )
        self._first_key = self._core.next_key = 1 + process.incarnation * _KEYS

        self._frontend = open_socket(zmq.ROUTER, run, "frontend", bind=True)
        self._backend = open_socket(zmq.ROUTER, run, "backend", bind=True)
        self._names = run.names
        self._vocabulary = vocabulary_of(run)
        me = self._names.of("proxy", process.index, process.incarnation)
        self._usage = open_socket(zmq.DEALER, run, "usage", identity=me)

        self._requests: dict[int, messages.Generate] = {}  # by key
        self._continuations = Continuations()
        self._incarnations: dict[bytes, tuple[int, int]] = {}  # generator peers: index, incarnation
        self._peers: dict[int, bytes] = {}  # generator index -> its peer
        self._clients: set[bytes] = set()  # that have said hello

        # What leaves at the end of a turn: reports to the broker, and to each peer of a socket all that is for it.
        self._reports: list[Message] = []
        self._letters: defaultdict[tuple[zmq.SyncSocket, bytes], list[Message]] = defaultdict(list)

        self._malformed = Malformed("proxy")
        self._undelivered = 0
        self._answered = 0
        self._sent_again = 0
        self._next_stats = 0.0

    def serve(self) -> None:
        """Serve until the supervisor says stop."""
        process = self._process
        # Generators first: their answers free room for requests.
        handlers = {self._backend: self._from_generator, self._frontend: self._from_client}
        again = {self._usage: lambda: self._reports.append(messages.ReportsLost())}
        receiver = Receiver(handlers, self._malformed, process.wake_fd, again=again)
        last = time.monotonic()

        while not process.stopping:
            receiver.wait(process.tick_s)  # also the resolution of its waits
            for message in process.received():
                if isinstance(message, messages.PeerDied):
                    self._peer_died(message)
            receiver.drain()
            self._send()

            now = time.monotonic()
            self._account(now, now - last)
            last = now

    def close(self) -> None:
        for socket in (self._frontend, self._backend, self._usage):
            socket.close()

    # ------------------------------------------------------------ events in

    def _from_client(self, message: Message, peer: bytes) -> None:
        self._names.sender(peer, "env_server", self._process.config.env.servers)
        match message:
            case messages.Generate():
                self._add(message, peer)
            case messages.Abort():
                self._perform(self._core.abort(time.monotonic(), peer, message.request_id))
            case messages.ClientHello():  # the identity says who it is
                if peer in self._clients:  # the connection broke: answers may be lost, and will be asked for again
                    self._reports.append(messages.ReportsLost())
                self._clients.add(peer)
            case _:
                raise ProtocolError(f"{type(message).__name__} from client {peer!r}")

    def _add(self, message: messages.Generate, peer: bytes) -> None:
        key = self._core.next_key
        check_request(message, self._vocabulary)
        prompt = message.prompt_ids

        # A session that is known has a cached prefix, which says more than the hash of its prompt.
        known = self._core.knows_session(message.session)

        actions = self._core.add(
            time.monotonic(),
            peer,
            message.request_id,
            session=message.session,
            kind=message.kind,
            prompt_len=prompt.size,
            max_tokens=message.max_tokens,
            priority=message.priority,
            prompt_hash=None if known else zlib.crc32(prompt.data) << 32 | prompt.size,
        )

        if self._core.next_key > key:  # else it was ignored
            self._requests[key] = replace(message, request_id=key)
        self._perform(actions)

    def _from_generator(self, message: Message, peer: bytes) -> None:
        if isinstance(message, messages.GeneratorHello):
            self._greeted(message, peer)
            return
        if peer not in self._incarnations:
            raise ProtocolError(f"{type(message).__name__} from {peer!r} before its hello")

        when_and_who = time.monotonic(), *self._incarnations[peer]
        match message:
            case messages.Generated(request_id=key) if key < self._first_key:  # asked for by a proxy that died
                self._reports.append(messages.Usage(message.session, message.tokens_generated, lost=True))
            case messages.Generated(request_id=key, tokens_generated=tokens, finish_reason=reason):
                self._perform(self._core.finished(*when_and_who, key, tokens, reason), message)
            case messages.FirstToken():
                self._perform(self._core.first_token(*when_and_who, message.request_id), message)

            case messages.GeneratorStatus():
                self._perform(self._core.status(*when_and_who, message.running, message.version))
                self._deliver(message.grown, *when_and_who[1:])
            case messages.Grown(requests=grown):
                self._deliver(grown, *when_and_who[1:])
            case _:
                raise ProtocolError(f"{type(message).__name__} from generator {peer!r}")

    def _deliver(self, grown: messages.Growth, index: int, incarnation: int) -> None:
        """Keep what requests have grown by, and pass it on to clients that read along."""
        read_along: defaultdict[Any, messages.Growth] = defaultdict(dict)
        for key, (start, columns) in grown.items():
            if not self._core.runs(index, incarnation, key):
                continue
            client, request_id = self._core.delivered(key, self._continuations.deliver(key, start, columns))
            if self._requests[key].stream:
                read_along[client][request_id] = self._continuations.kept(key) + start, columns

        for client, parts in read_along.items():
            self._letters[self._frontend, client].append(messages.Grown(parts))

    def _greeted(self, hello: messages.GeneratorHello, peer: bytes) -> None:
        me = hello.generator, hello.incarnation
        if me != self._names.sender(peer, "generator", self._process.config.generator.count):
            raise ProtocolError(f"GeneratorHello in the name of another than {peer!r}")
        if min(hello.kv_tokens, hello.max_num_seqs, hello.max_model_len) < 1:
            raise ProtocolError(f"GeneratorHello of {peer!r} without room for a token")
        if peer in self._incarnations:  # the connection broke and was made again
            self._perform(self._core.generator_again(time.monotonic(), *me, hello.requests))
            return

        self._incarnations[peer] = me
        known = self._peers.get(hello.generator)
        if known is None or self._incarnations[known][1] <= hello.incarnation:
            self._peers[hello.generator] = peer

        limits = hello.kv_tokens, hello.max_num_seqs, hello.max_model_len
        self._perform(self._core.generator_up(time.monotonic(), *me, *limits))

    def _peer_died(self, died: messages.PeerDied) -> None:
        now = time.monotonic()
        if died.role == "generator":
            before = self._core.queue_depth
            self._perform(self._core.generator_died(now, died.index, died.incarnation))
            self._sent_again += max(0, self._core.queue_depth - before)
        elif died.role == "env_server":
            self._perform(self._core.client_died(now, self._names.of("env_server", died.index, died.incarnation)))

    # ------------------------------------------------------------ actions out

    def _perform(self, actions: list[Action], cause: Message | None = None) -> None:
        """`cause`: the generator's message that the actions follow from, whose content they pass on."""
        if actions:
            self._process.waits.ended()
        for action in actions:
            match action:
                case SendTo():
                    self._continuations.sent(action.key)
                    self._letters[self._backend, self._peers[action.generator]].append(self._requests[action.key])
                case AbortAt():
                    self._letters[self._backend, self._peers[action.generator]].append(messages.Abort(action.key))
                case Reply():
                    self._reply(action, cause)

                case Forget():
                    del self._requests[action.key]
                    self._continuations.answer(action.key, {}, {})
                case GoOn(key, tokens):
                    self._requests[key] = self._continuations.go_on(self._requests[key], tokens)
                case Rename(key, new_key):
                    self._requests[new_key] = replace(self._requests.pop(key), request_id=new_key)
                    self._continuations.rename(key, new_key)

                case ReportFirstToken():
                    assert isinstance(cause, messages.FirstToken)
                    self._reports.append(messages.FirstToken(action.key, action.session, cause.version))
                case messages.Usage() | messages.ReportsLost() | messages.StillSampling():
                    self._reports.append(action)

    def _reply(self, reply: Reply, answer: Message | None) -> None:
        request = self._requests.pop(reply.key)
        self._answered += 1
        if reply.forward:
            assert isinstance(answer, messages.Generated)
            message = replace(answer, request_id=reply.request_id, queued_s=answer.queued_s + reply.queued_s)
        else:
            message = _empty_answer(reply, request)

        columns, context, kept = self._continuations.answer(reply.key, message.columns, message.context)
        if kept:
            tokens = kept + message.tokens_generated
            message = replace(message, columns=columns, context=context, tokens_generated=tokens)
        assert isinstance(reply.client, bytes)
        self._letters[self._frontend, reply.client].append(message)

    def _send(self) -> None:
        """The end of a turn. Reports first: the broker counts tokens before it gets the trajectory that has them.

        A peer that is gone is reported by the supervisor; until then nothing is done on the suspicion.
        """
        send_all(self._usage, self._reports)
        for (socket, peer), together in self._letters.items():
            try:
                send_all(socket, together, peer)
            except PeerGone:
                self._undelivered += len(together)
        self._reports.clear()
        self._letters.clear()

    # ------------------------------------------------------------ accounting

    def _account(self, now: float, elapsed: float) -> None:
        process = self._process
        core = self._core
        process.progress += 1
        process.busy = core.live_requests > 0
        if core.queue_depth:
            process.waits.add("generators", elapsed)
        elif not core.in_flight:
            process.waits.add("environments", elapsed)

        if now >= self._next_stats:
            self._next_stats = now + process.config.timeouts.heartbeat_s
            process.stats = self._stats()

    def _stats(self) -> dict[str, float]:
        core = self._core
        loads = core.loads()

        stats: dict[str, float] = {
            "queue_depth": core.queue_depth,
            "in_flight": core.in_flight,
            "generators": len(loads),
            "outstanding_tokens": sum(load for load, _, _ in loads.values()),
            "answered": self._answered,
            "ignored": core.ignored,
            "malformed": self._malformed.count,
            "undelivered": self._undelivered,
            "sent_again": self._sent_again,
        }

        for index, (load, reserved, live) in loads.items():
            stats |= {f"outstanding.{index}": load, f"kv_reserved.{index}": reserved, f"live.{index}": live}
        return stats


def _empty_answer(reply: Reply, request: messages.Generate) -> messages.Generated:
    """The answer to a request that no generator answers."""
    return messages.Generated(
        request_id=reply.request_id,
        session=request.session,
        columns=masked_columns({"token": 0, **ONE_TURN}, "generator"),
        timeline=request.version.timeline,
        finish_reason=reply.finish_reason,
        tokens_generated=0,
        generator=-1,
        queued_s=reply.queued_s,
        error=reply.error,
    )


def main() -> None:
    with Process("proxy", context_from_command_line()) as process, contextlib.closing(Proxy(process)) as proxy:
        proxy.serve()
    leave()


if __name__ == "__main__":
    main()

"""The proxy process: moves requests and answers between environment servers and generators.

    python -m rollout.proxy.process --run DIR

`ProxyCore` decides; this shell keeps each request's message by the core's key (request ids are unique per
client only, keys are unique here) until it is answered, so that it can be sent again after a generator's death.
Array frames are passed on as they came. No torch; one plain poll loop that drains every socket in turn.
"""

from __future__ import annotations

import time
import zlib

import zmq
from msgspec.structs import replace

from rl.core import messages
from rl.core.columns import ONE_TURN, masked_columns
from rl.core.messages import Message, ProtocolError
from rl.core.process import Process
from rl.core.receiving import Malformed, Receiver
from rl.core.run import ProcessContext, context_from_command_line
from rl.core.sockets import PeerGone, identity, open_socket, send, send_to
from rollout.proxy.actions import AbortAt, Action, Forget, Reply, ReportFirstToken, ReportUsage, SendTo
from rollout.proxy.core import ProxyCore

_POLL_S = 0.1  # also the resolution of the progress counter and of waits


class Proxy:
    """Sockets, payloads and addresses around a `ProxyCore`."""

    def __init__(self, process: Process) -> None:
        run = process.run
        self._process = process
        self._core = ProxyCore(
            cache_survives_update=run.config.generator.on_update == "keep", pin_prompts=run.config.rollout.pin_prompts
        )
        self._frontend = open_socket(zmq.ROUTER, run, "frontend", bind=True)
        self._backend = open_socket(zmq.ROUTER, run, "backend", bind=True)
        self._usage = open_socket(zmq.PUSH, run, "usage")

        self._requests: dict[int, messages.Generate] = {}  # by key
        self._incarnations: dict[bytes, tuple[int, int]] = {}  # generator peers: index, incarnation
        self._peers: dict[int, bytes] = {}  # generator index -> its peer

        self._malformed = Malformed("proxy")
        self._undelivered = 0
        self._answered = 0
        self._sent_again = 0
        self._next_stats = 0.0

    def serve(self) -> None:
        """Until the supervisor says stop."""
        process = self._process
        # Generators first: their answers free room for requests.
        handlers = {self._backend: self._from_generator, self._frontend: self._from_client}
        receiver = Receiver(handlers, self._malformed, process.wake_fd)
        last = time.monotonic()

        while not process.stopping:
            receiver.wait(_POLL_S)
            for message in process.received():
                if isinstance(message, messages.PeerDied):
                    self._peer_died(message)
            receiver.drain()

            now = time.monotonic()
            self._account(now, now - last)
            last = now

    def close(self) -> None:
        for socket in (self._frontend, self._backend, self._usage):
            socket.close()

    # ------------------------------------------------------------ events in

    def _from_client(self, message: Message, peer: bytes) -> None:
        match message:
            case messages.Generate():
                self._add(message, peer)
            case messages.Abort():
                self._perform(self._core.abort(time.monotonic(), peer, message.request_id))
            case messages.ClientHello():
                pass  # the identity says who it is
            case _:
                raise ProtocolError(f"{type(message).__name__} from client {peer!r}")

    def _add(self, message: messages.Generate, peer: bytes) -> None:
        key = self._core.next_key
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
            self._generator_up(message, peer)
            return
        if peer not in self._incarnations:
            raise ProtocolError(f"{type(message).__name__} from {peer!r} before its hello")

        sender = time.monotonic(), *self._incarnations[peer]
        match message:
            case messages.Generated(request_id=key, tokens_generated=tokens, finish_reason=reason):
                self._perform(self._core.finished(*sender, key, tokens, reason), message)
            case messages.FirstToken():
                self._perform(self._core.first_token(*sender, message.request_id), message)
            case messages.GeneratorStatus():
                self._perform(self._core.status(*sender, message.running, message.version))
            case _:
                raise ProtocolError(f"{type(message).__name__} from generator {peer!r}")

    def _generator_up(self, hello: messages.GeneratorHello, peer: bytes) -> None:
        sender = hello.generator, hello.incarnation
        self._incarnations[peer] = sender
        known = self._peers.get(hello.generator)
        if known is None or self._incarnations[known][1] <= hello.incarnation:
            self._peers[hello.generator] = peer

        limits = hello.kv_tokens, hello.max_num_seqs, hello.max_model_len
        self._perform(self._core.generator_up(time.monotonic(), *sender, *limits))

    def _peer_died(self, died: messages.PeerDied) -> None:
        now = time.monotonic()
        if died.role == "generator":
            before = self._core.queue_depth
            self._perform(self._core.generator_died(now, died.index, died.incarnation))
            self._sent_again += max(0, self._core.queue_depth - before)
        elif died.role == "env_server":
            self._perform(self._core.client_died(now, identity("env_server", died.index, died.incarnation)))

    # ------------------------------------------------------------ actions out

    def _perform(self, actions: list[Action], cause: Message | None = None) -> None:
        """`cause`: the generator's message that the actions follow from, whose content they pass on."""
        for action in actions:
            match action:
                case SendTo():
                    self._send_to(self._backend, self._peers[action.generator], self._requests[action.key])
                case AbortAt():
                    self._send_to(self._backend, self._peers[action.generator], messages.Abort(action.key))
                case Reply():
                    self._reply(action, cause)
                case Forget():
                    del self._requests[action.key]

                case ReportFirstToken():
                    assert isinstance(cause, messages.FirstToken)
                    send(self._usage, messages.FirstToken(action.key, action.session, cause.version))
                case ReportUsage():
                    send(self._usage, messages.Usage(action.session, action.tokens, action.lost))

    def _reply(self, reply: Reply, answer: Message | None) -> None:
        request = self._requests.pop(reply.key)
        self._answered += 1
        if reply.forward:
            assert isinstance(answer, messages.Generated)
            message = replace(answer, request_id=reply.request_id, queued_s=answer.queued_s + reply.queued_s)
        else:
            message = _empty_answer(reply, request)
        assert isinstance(reply.client, bytes)
        self._send_to(self._frontend, reply.client, message)

    def _send_to(self, socket: zmq.SyncSocket, peer: bytes, message: Message) -> None:
        """A peer that is gone is reported by the supervisor; until then nothing is done on the suspicion."""
        try:
            send_to(socket, peer, message)
        except PeerGone:
            self._undelivered += 1

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
    """Of a request that no generator answers."""
    return messages.Generated(
        request_id=reply.request_id,
        session=request.session,
        columns=masked_columns({"token": 0, **ONE_TURN}, "generator"),
        epoch=request.version.epoch,
        finish_reason=reply.finish_reason,
        tokens_generated=0,
        generator=-1,
        queued_s=reply.queued_s,
        error=reply.error,
    )


def main(context: ProcessContext) -> None:
    with Process("proxy", context) as process:
        proxy = Proxy(process)
        try:
            proxy.serve()
        finally:
            proxy.close()


if __name__ == "__main__":
    main(context_from_command_line())

"""The gateway of one environment server: an address and a secret for each ticket, and nothing without them.

    /s/<ticket>/v1/chat/completions · /s/<ticket>/v1/responses · /s/<ticket>/v1/messages (and count_tokens, models)

It listens on loopback, or on the cluster's interface where the run's sockets do, at a port that the kernel chooses. A
client that goes away ends its request (`Session`); a retry is known by the header that the SDKs send.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from aiohttp import web

from envs.gateway import anthropic_messages, openai_chat, openai_responses, rules
from envs.gateway.openai_chat import Event
from envs.gateway.rules import Body
from rl.wire.text import Mender
from rollout.episodes.environment import Endpoint
from rollout.episodes.forest import RequestRefused
from rollout.episodes.parsing import no_constant
from rollout.episodes.session import LiveAnswer, ModelAnswer, ModelRequest, Session, SessionClosed
from rollout.episodes.turns import EpisodeFailed

LARGEST_BODY = 64 << 20  # bytes
DEEPEST_BODY = 100  # levels of lists and objects: what reads and writes it later is recursive
STOP_S = 1.0  # for connections to end
_STREAM = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
_FAILURES: dict[type[Exception], int] = {RequestRefused: 400, EpisodeFailed: 500, SessionClosed: 409}  # status of each


class Writer(Protocol):
    """The events of one stream: `more` as often as there is more to tell, then `end`."""

    def more(self, live: list[LiveAnswer]) -> Iterator[Event]: ...
    def end(self, answers: list[ModelAnswer]) -> Iterator[Event]: ...


class Api(Protocol):
    """A client's API as four functions: the modules beside this one."""

    def read(self, body: Body, is_retry: bool) -> ModelRequest: ...
    def write(self, answers: list[ModelAnswer], body: Body) -> dict[str, Any]: ...
    def Writer(self, body: Body) -> Writer: ...
    def error(self, status: int, message: str) -> dict[str, Any]: ...


@dataclass(frozen=True)
class _Open:
    session: Session
    secret: str


class Gateway:
    """`open` starts it at its first call; `stop` ends it. `host`: the address at which it listens."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._open: dict[str, _Open] = {}
        self._runner: web.AppRunner | None = None
        self._starting = asyncio.Lock()
        self._address = ""

    @asynccontextmanager
    async def open(self, ticket_id: int, session: Session) -> AsyncIterator[Endpoint]:
        """The session answers at this address for as long as the context is open."""
        async with self._starting:
            if self._runner is None:
                await self._start()

        name = str(ticket_id)
        secret = secrets.token_urlsafe(24)
        self._open[name] = _Open(session, secret)
        try:
            yield Endpoint(f"{self._address}/s/{name}", secret)
        finally:
            del self._open[name]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _start(self) -> None:
        app = web.Application(client_max_size=LARGEST_BODY)
        base = "/s/{ticket}/v1"
        app.router.add_post(base + "/chat/completions", self._answers(openai_chat))
        app.router.add_post(base + "/responses", self._answers(openai_responses))
        app.router.add_post(base + "/messages", self._answers(anthropic_messages))
        app.router.add_post(base + "/messages/count_tokens", self._count_tokens)
        app.router.add_get(base + "/models", self._models)

        # A client that goes away cancels its handler, which ends the generation.
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_S)
        await runner.setup()
        site = web.TCPSite(runner, self._host, 0)
        await site.start()
        self._runner = runner
        host, port = runner.addresses[0][:2]
        self._address = f"http://{host}:{port}"

    def _session(self, request: web.Request) -> Session | None:
        """The session that this request has the secret of."""
        opened = self._open.get(request.match_info["ticket"])
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        key = request.headers.get("x-api-key") or bearer
        if opened is None or not hmac.compare_digest(key.encode(), opened.secret.encode()):
            return None
        return opened.session

    def _answers(self, api: Api) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request)
            if session is None:
                return _refused(api, 401, "no open session has this address and this key")

            try:
                body = await _body(request, session)
                wanted = api.read(body, request.headers.get("x-stainless-retry-count", "0") != "0")
                headers = {"x-fresco-overridden": ", ".join(rules.overridden(body))}
                if wanted.stream:
                    return await _Stream(request, api, body, headers).play(session, wanted)
                return _json(api.write(await session.respond(wanted), body), headers=headers)
            except tuple(_FAILURES) as error:
                return _refused(api, _status(error), str(error))

        return handle

    async def _count_tokens(self, request: web.Request) -> web.Response:
        session = self._session(request)
        if session is None:
            return _refused(anthropic_messages, 401, "no open session has this address and this key")
        try:
            wanted = anthropic_messages.read(await _body(request, session), is_retry=False)
            return _json({"input_tokens": session.forest.count_tokens(wanted.messages, wanted.tools)})
        except RequestRefused as error:
            return _refused(anthropic_messages, 400, str(error))

    async def _models(self, request: web.Request) -> web.Response:
        if self._session(request) is None:
            return _refused(openai_chat, 401, "no open session has this address and this key")
        model = {"id": "fresco", "object": "model", "type": "model", "display_name": "fresco", "owned_by": "fresco"}
        return _json({"object": "list", "data": [model | {"created": 0}], "has_more": False})


def _status(error: Exception) -> int:
    return next(status for kind, status in _FAILURES.items() if isinstance(error, kind))


def _refused(api: Api, status: int, message: str) -> web.Response:
    return _json(api.error(status, message), status=status)


def _json(data: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data), status=status, headers=headers, content_type="application/json", charset="utf-8"
    )


async def _body(request: web.Request, session: Session) -> Body:
    data = await request.read()
    try:
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError):
        body = _with_halves(data, session.forest.mender)
    if not isinstance(body, dict):
        raise RequestRefused("the body is no JSON object")
    if _levels(body) > DEEPEST_BODY:
        raise RequestRefused(f"the body is nested more than {DEEPEST_BODY} levels deep")
    return body


def _with_halves(data: bytes, mender: Mender) -> Any:
    """JSON that may name half of a surrogate pair. Raises RequestRefused."""
    try:
        return mender.value(json.loads(data, parse_constant=no_constant))
    except (ValueError, RecursionError):
        raise RequestRefused("the body is no JSON") from None


def _levels(value: Any) -> int:
    """The levels of nested lists and objects; a number or a text has none."""
    levels = 0
    found = [value]
    while found := [each for each in found if isinstance(each, dict | list)]:
        levels += 1
        found = [inner for each in found for inner in (each.values() if isinstance(each, dict) else each)]
    return levels


class _Stream:
    """One answer as server-sent events: its status is sent with the first of them, and a later failure as the last."""

    def __init__(self, request: web.Request, api: Api, body: Body, headers: dict[str, str]) -> None:
        self._request = request
        self._api = api
        self._writer = api.Writer(body)
        self._response = web.StreamResponse(headers=_STREAM | headers)
        self._live: list[LiveAnswer] = []
        self._news = asyncio.Event()

    async def play(self, session: Session, wanted: ModelRequest) -> web.StreamResponse:
        """Raises what `Session.respond` raises while nothing has been sent."""
        answering = asyncio.create_task(session.respond(wanted, self._follow))
        answering.add_done_callback(lambda _: self._news.set())
        try:
            while not answering.done():
                await self._news.wait()
                self._news.clear()
                if not answering.done():
                    await self._send(self._writer.more(self._live))
            await self._send(self._writer.end(answering.result()))

        except tuple(_FAILURES) as error:
            if not self._response.prepared:
                raise
            await self._send([("error", self._api.error(_status(error), str(error)))])
        finally:
            answering.cancel()  # of a client that has gone away

        await self._response.write_eof()
        return self._response

    def _follow(self, live: list[LiveAnswer]) -> None:
        self._live = live
        self._news.set()

    async def _send(self, events: Iterable[Event]) -> None:
        pieces = []
        for name, data in events:
            text = data.encode() if isinstance(data, str) else msgspec.json.encode(data)
            pieces += [f"event: {name}\n".encode() if name else b"", b"data: ", text, b"\n\n"]

        if not self._response.prepared:
            await self._response.prepare(self._request)
        await self._response.write(b"".join(pieces))

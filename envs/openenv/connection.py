"""One session with an OpenEnv server: its WebSocket, a JSON message there and one back."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp

LARGEST = 64 << 20  # bytes of a message
SHOWN = 300  # characters of an error
OF_THE_ACTION = frozenset({"INVALID_JSON", "VALIDATION_ERROR", "EXECUTION_ERROR"})
"""Errors that say that an action was wrong. Any other is the server's trouble."""


class ActionRefused(Exception):
    """The server did not take the action; the message is its own."""


class Connection:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """The answer's data. Raises ActionRefused, or ConnectionError where the server is not there or is full."""
        if self._socket is None:
            try:
                self._socket = await self._http.ws_connect(f"{self._url}/ws", max_msg_size=LARGEST)
            except (aiohttp.ClientError, OSError) as error:
                raise ConnectionError(f"the OpenEnv server at {self._url} opens no session: {error}") from None

        await self._socket.send_str(json.dumps({"type": kind, "data": data}))
        message = await self._socket.receive()
        if message.type is not aiohttp.WSMsgType.TEXT:
            raise ConnectionError(
                f"the OpenEnv server at {self._url} ended the session ({message.extra or 'no reason'})"
            )

        answer = json.loads(message.data)
        said: dict[str, Any] = answer.get("data") or {}
        if answer.get("type") != "error":
            return said
        text = json.dumps(said)[:SHOWN]
        if said.get("code") in OF_THE_ACTION and kind == "step":
            raise ActionRefused(str(said.get("message") or text)[:SHOWN])
        raise ConnectionError(
            f"the OpenEnv server at {self._url} answered {kind} with {text}; is env.options.sessions right?"
        )

    async def close(self) -> None:
        if self._socket is None or self._socket.closed:
            return
        try:
            await self._socket.send_str(json.dumps({"type": "close"}))
        except (aiohttp.ClientError, OSError):
            pass  # it has gone already
        async with asyncio.timeout(5):
            await self._socket.close()

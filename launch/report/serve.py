"""`fresco report --serve`: the page of runs that go on, on this machine alone.

It reads the runs' files when a page that is open asks for what is new, and touches nothing. Reading takes a tenth of
its time at most, however large the runs are. Only who knows the address, with its secret part, is answered.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import threading
import time
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec

from launch.report.gather import RunPage, gather
from launch.report.page import Live, blocks_of, render
from rl.config.schema import ConfigError

_HOST = "127.0.0.1"
_PARTS = ("*", "trace/*", "samples/**/*")
_POLL_S = 2.0
_SHARE = 10  # it rests so many times as long as it has read


class News(NamedTuple):
    tag: str
    pages: list[RunPage]


class Reader:
    """What is known of the runs, read anew when their files have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises ConfigError."""
        self._folders = folders
        self._lock = threading.Lock()
        self._state: list[tuple[str, int, int]] = []
        self._rests_until = 0.0
        self._news = self._read()

    def news(self) -> News:
        """Raises ConfigError where a file is damaged."""
        with self._lock:
            if time.monotonic() >= self._rests_until and self._files() != self._state:
                self._news = self._read()
            return self._news

    def _read(self) -> News:
        begin = time.monotonic()
        self._state = self._files()  # before: what comes while runs are read is read the next time
        pages = [gather(folder) for folder in self._folders]
        now = time.monotonic()
        self._rests_until = now + _SHARE * (now - begin)
        return News(secrets.token_hex(8), pages)

    def _files(self) -> list[tuple[str, int, int]]:
        """Every file that a report may read, with its size and time."""
        found = []
        for folder, part in itertools.product(self._folders, _PARTS):
            for path in folder.glob(part):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    found.append((str(path), status.st_size, status.st_mtime_ns))
        return sorted(found)


class _Handler(BaseHTTPRequestHandler):
    server: LiveServer

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        place = asked.path.removeprefix(f"/{self.server.secret}/")
        if place == asked.path or place not in ("", "data"):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")
            return

        try:
            news = self.server.reader.news()
        except ConfigError as error:
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{error}\n".encode())
            return

        if not place:
            page = render(news.pages, Live(news.tag, _POLL_S))
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", page.encode())
        elif parse_qs(asked.query).get("since") == [news.tag]:
            self._answer(HTTPStatus.NO_CONTENT)
        else:
            told = {"tag": news.tag, "blocks": blocks_of(news.pages)}
            self._answer(HTTPStatus.OK, "application/json", msgspec.json.encode(told))

    def _answer(self, status: HTTPStatus, kind: str = "", content: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
        if kind:
            self.send_header("Content-Type", kind)
        if status is not HTTPStatus.NO_CONTENT:
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Nothing: the terminal has one line, the address."""


class LiveServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folders: Sequence[Path], port: int = 0) -> None:
        """Raises ConfigError where a run cannot be read, OSError where the port is taken. port 0: any that is free."""
        self.reader = Reader(folders)
        self.secret = secrets.token_urlsafe(16)
        super().__init__((_HOST, port), _Handler)

    @property
    def address(self) -> str:
        return f"http://{_HOST}:{self.server_port}/{self.secret}/"


def serve(folders: Sequence[Path], port: int) -> None:
    """Until Ctrl-C. Raises ConfigError."""
    try:
        server = LiveServer(folders, port)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; name another, or 0 for any that is free") from None
    with server:
        print(f"report: {server.address} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()

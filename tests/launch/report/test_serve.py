"""The page that is served: it follows a run, on this machine alone, and touches nothing."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Page

from launch.cli import main
from launch.report import serve
from launch.report.serve import LiveServer
from tests.launch.report.runs import copied
from tests.launch.simulated_run import ROOT

Serving = Callable[[Path], AbstractContextManager[LiveServer]]


@contextmanager
def serving(folder: Path) -> Iterator[LiveServer]:
    with LiveServer([folder]) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def run(played: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One that goes on: it has trained the first of its steps."""
    monkeypatch.setattr(serve, "_SHARE", 0)
    folder = copied(played, tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "rest").write_text("".join(lines[2:]))
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    return folder


def go_on(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write((run / "rest").read_text())


def answer(address: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(address, timeout=60) as told:
            return told.status, told.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


def opened(browser: Browser, server: LiveServer, told: list[str]) -> Page:
    page = browser.new_page()
    page.set_default_timeout(240_000)
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.goto(server.address)
    page.wait_for_selector("main[data-view=overview]")
    return page


def test_an_open_page_follows_the_run(browser: Browser, run: Path) -> None:
    told: list[str] = []
    with serving(run) as server:
        page = opened(browser, server, told)
        steps = int(page.inner_text(".tile:has-text('state') small").split()[0])
        go_on(run)
        page.wait_for_selector(f".tile:has-text('state') small:not(:text-matches('^{steps} of'))")
        assert page.inner_text(".tile:has-text('state') small").startswith("3 of 3 steps")
        assert page.inner_text("#live") == "live" and not told
        page.close()


def test_what_somebody_reads_stays(browser: Browser, run: Path) -> None:
    told: list[str] = []
    with serving(run) as server:
        page = opened(browser, server, told)
        page.click("nav button[data-view=samples]")
        page.wait_for_selector("main[data-view=samples]")
        page.locator(".list button").nth(5).click()
        read = page.inner_text(".talk h3")
        go_on(run)
        page.click("button:has-text('show what is new')")
        page.wait_for_selector("button:has-text('show what is new')", state="hidden")
        page.wait_for_selector("main[data-view=samples]")
        assert page.inner_text(".talk h3") == read and not told
        page.close()


def test_it_is_read_anew_when_files_have_changed_and_not_all_the_time(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(run) as server:
        first = json.loads(answer(f"{server.address}data?since=")[1])
        assert answer(f"{server.address}data?since={first['tag']}") == (204, b"")
        go_on(run)
        second = json.loads(answer(f"{server.address}data?since={first['tag']}")[1])
        assert second["tag"] != first["tag"] and second["blocks"].keys() == first["blocks"].keys()

        monkeypatch.setattr(serve, "_SHARE", 1_000_000)
        (run / "summary.json").write_text(json.dumps({"steps": 3}))
        third = json.loads(answer(f"{server.address}data?since={second['tag']}")[1])
        (run / "summary.json").write_text(json.dumps({"steps": 2}))
        assert answer(f"{server.address}data?since={third['tag']}") == (204, b""), "it rests as long as is its share"


def test_only_who_knows_the_address_on_this_machine_is_answered(run: Path) -> None:
    with serving(run) as server:
        assert server.server_address[0] == "127.0.0.1"
        root = f"http://127.0.0.1:{server.server_port}"
        for path in ("/", "/data", f"/{server.secret}", f"/{server.secret}/../run.json", f"/{server.secret}/curve.key"):
            assert answer(root + path)[0] == 404
        assert answer(server.address)[0] == 200


def test_nothing_of_the_run_is_touched(run: Path) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in run.rglob("*") if path.name != "lock"}

    before = state()
    with serving(run) as server:
        assert answer(server.address)[0] == 200
    assert state() == before


def test_a_damaged_file_is_said_and_the_server_goes_on(run: Path) -> None:
    with serving(run) as server:
        whole = (run / "run.json").read_bytes()
        (run / "run.json").write_bytes(b"{}")
        status, said = answer(server.address)
        assert status == 503 and b"run.json" in said
        (run / "run.json").write_bytes(whole)
        assert answer(server.address)[0] == 200


def test_a_port_that_is_taken_is_one_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main(["report", str(run), "--serve", "--port", str(port)]) == 2
    assert f"--port {port}" in capsys.readouterr().err


def test_the_command_says_its_address_and_ends_by_an_interrupt(run: Path) -> None:
    command = [sys.executable, "-m", "launch.cli", "report", str(run), "--serve"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        address = server.stdout.readline().split()[1]
        assert answer(address)[0] == 200
        process = psutil.Process(server.pid)
        listening = {each.laddr.ip for each in process.net_connections() if each.status == "LISTEN"}
        assert listening == {"127.0.0.1"}
        server.send_signal(2)
        _, error = server.communicate(timeout=60)
    assert (server.returncode, error) == (0, "")

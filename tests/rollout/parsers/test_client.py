"""An environment server's line to the parsers: deadlines, a successor, and the end. The test plays the other side."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import zmq

from experiments.gateway.agents import TOOLS
from launch.memory import estimate
from launch.plan import make_plan
from rl.wire.messages import ClientHello, Message, ParserHello, ParseTurn, Stop, TurnParsed
from rl.wire.process import Process, WaitExpired
from rl.wire.receiving import Malformed
from rl.wire.run import ProcessContext, RunFile
from rl.wire.sockets import open_socket, send_to
from rollout.episodes.live import LiveTurn
from rollout.episodes.parsing import ParsedTurn, SampledText, TurnReader
from rollout.episodes.tokenizer import IdTokenizer
from rollout.parsers.client import ParserClient
from tests.conftest import MakeRun
from tests.inbox import arrived

TURN = SampledText("why</think>hello", "<think>", TOOLS)
ANSWER: dict[str, Any] = {"content": "hello", "reasoning": "why", "calls": [("add", "{}")]}
READ = ParsedTurn("hello", "why", (("add", "{}"),))


class Side:
    """Of the parsers."""

    def __init__(self, run: RunFile) -> None:
        self._run = run
        self.open()

    def open(self) -> None:
        self.socket = open_socket(zmq.ROUTER, self._run, "parsers", bind=True)
        self.heard: list[Message] = []

    def close(self) -> None:
        self.socket.close(linger=0)

    async def hears(self, wanted: Sequence[type]) -> None:
        while [type(message) for message in self.heard] != list(wanted):
            self.heard += [message for _, message in arrived(self.socket)]
            assert len(self.heard) <= len(wanted), self.heard
            await asyncio.sleep(0.001)

    def says(self, message: Message) -> None:
        send_to(self.socket, b"env_server.0.0", message)


Scene = Callable[[ParserClient, Side], Coroutine[Any, Any, None]]


@pytest.fixture
def play(make_run: MakeRun) -> Callable[..., None]:
    def played(scene: Scene, *overrides: str) -> None:
        run = make_run("chat.parser=vllm:hermes", *overrides)

        async def on_a_loop() -> None:
            side = Side(run)
            failures: list[Exception] = []
            client = ParserClient(
                Process("env_server", ProcessContext(run, 0, 0)), Malformed("env_server"), failures.append
            )
            async with asyncio.timeout(30):
                await scene(client, side)
            client.close()
            side.close()
            assert not failures

        asyncio.run(on_a_loop())

    return played


def ask(client: ParserClient) -> asyncio.Task[ParsedTurn]:
    return asyncio.create_task(client.parsed(TURN))


def test_a_turn_is_read_elsewhere(play: Callable[..., None]) -> None:
    async def scene(client: ParserClient, side: Side) -> None:
        ready = asyncio.create_task(client.ready())
        await side.hears([ClientHello])
        side.says(ParserHello("<think>"))
        await ready
        assert client.opener == "<think>"

        both = [ask(client), ask(client)]
        await side.hears([ClientHello, ParseTurn, ParseTurn])
        _, first, second = side.heard
        assert isinstance(first, ParseTurn) and isinstance(second, ParseTurn)
        assert first.text == "<think>why</think>hello" and json.loads(first.tools) == TOOLS
        side.says(TurnParsed(second.request_id, "second"))
        side.says(TurnParsed(first.request_id, **ANSWER))
        assert await both[0] == READ and (await both[1]).content == "second"
        assert client.stats["parse_failures"] == 0 and client.stats["parse_wait_s"] > 0

    play(scene)


def test_what_is_not_read_in_time_stays_content(play: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    async def scene(client: ParserClient, side: Side) -> None:
        turns = [ask(client) for _ in range(5)]
        assert [await turn for turn in turns] == [ParsedTurn("why</think>hello")] * 5
        await side.hears([ParseTurn] * 5)
        (late, *_) = side.heard
        assert isinstance(late, ParseTurn)
        side.says(TurnParsed(late.request_id, **ANSWER))  # nobody waits for it any more

        failed = ask(client)
        await side.hears([ParseTurn] * 6)
        message = side.heard[-1]
        assert isinstance(message, ParseTurn)
        side.says(TurnParsed(message.request_id, failed="it raised"))
        assert await failed == ParsedTurn("why</think>hello")
        assert client.stats["parse_failures"] == 6

    play(scene, "chat.parse_deadline_s=0.3")
    (line,) = capsys.readouterr().err.splitlines()  # one in ten seconds
    assert line.startswith("turn 1 that stays content: parsers.0 did not answer within chat.parse_deadline_s=0.3")


def test_a_successor_is_asked_again(play: Callable[..., None]) -> None:
    async def scene(client: ParserClient, side: Side) -> None:
        old = ask(client)
        await side.hears([ParseTurn])
        side.close()
        side.open()
        client.peer_died()
        await side.hears([ClientHello, ParseTurn])

        young = ask(client)
        await side.hears([ClientHello, ParseTurn, ParseTurn])
        side.close()
        side.open()
        client.peer_died()  # what the two have in common stays content
        await side.hears([ClientHello, ParseTurn])
        side.says(TurnParsed(2, **ANSWER))
        assert (await old, await young) == (ParsedTurn("why</think>hello"), READ)
        assert client.stats["parse_failures"] == 1

    play(scene)


def test_the_end_of_a_run_waits_for_no_parser(play: Callable[..., None]) -> None:
    async def scene(client: ParserClient, side: Side) -> None:
        turn = ask(client)
        await side.hears([ParseTurn])
        client.close()
        assert await turn == await client.parsed(TURN) == ParsedTurn("why</think>hello")

    play(scene, "chat.parse_deadline_s=1000")


def test_a_process_that_does_not_become_ready_is_named(play: Callable[..., None]) -> None:
    async def scene(client: ParserClient, side: Side) -> None:
        with pytest.raises(WaitExpired, match=r"env_server\.0 waited 0\.2 s for parsers\.0"):
            await client.ready()
        side.says(Stop("forged"))  # dropped
        client._process.stopping = True
        await client.ready()

    play(scene, "timeouts.start_s=0.2")


def test_only_a_run_with_vllm_parsers_has_a_process_for_them(make_run: MakeRun) -> None:
    for run, count in ((make_run("generator.count=2"), 0), (make_run("chat.parser=vllm:hermes"), 1)):
        for device in ("cpu", "cuda"):
            specs = [spec for spec in make_plan(run.config, device) if spec.role == "parsers"]
            assert len(specs) == count and all(spec.environment["CUDA_VISIBLE_DEVICES"] == "" for spec in specs)
            assert [need.what for need in estimate(run.config, device, None)].count("process of parsers") == count


def test_a_stream_is_sent_when_the_turn_is_complete(play: Callable[..., None]) -> None:
    async def scene(client: ParserClient, side: Side) -> None:
        live = LiveTurn(TurnReader(IdTokenizer(), client), "", [])
        assert not live.grew([1, 2]) and not live.grew([3]) and not live.content
        assert live.text() == "1 2 3"

    play(scene)

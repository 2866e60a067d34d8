"""What the gateway costs beside the native path: tokens per second and latency, at 1 and at 128 sessions.

    python -m experiments.bench gateway [--rounds 5] [--turns 4] [--tokens 128] [--sessions 1 128] [--out FILE.json]

Each session plays `--turns` turns. Native: a `Conversation` asks the engine itself. Gateway: a client (of aiohttp, or
with --sdk that of OpenAI) asks over HTTP, streaming and not, in the same process, so that its own work counts against
the gateway. The engine is a
timer. An answer takes `--tokens` times `--token-ms` when alone, and `--busy-token-ms` at more sessions, which is what
vLLM takes on this kind of machine. Streams get a piece as often as a generator tells of one. Sessions begin one after
the other, so that their answers do not all end in the same moment, which no engine does. Tokens per second are those of
the sessions' own time. Latency added is the median time of a turn less that of the native path. CPU added is that of
the whole process, its clients included.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from openai import AsyncOpenAI

from envs.gateway.server import Gateway
from experiments.bench._measuring import parser_of, write
from experiments.bench._ratios import machine
from experiments.gateway.tokenizers import make_folder
from rl.config.schema import Config, load_config
from rl.wire.messages import Generate, Generated, Ticket, Turn, Version
from rollout.episodes.conversation import Conversation
from rollout.episodes.environment import ChatMessage, Endpoint
from rollout.episodes.forest import Forest
from rollout.episodes.generation import Read
from rollout.episodes.parsing import HermesParser, TurnReader
from rollout.episodes.session import Session
from rollout.episodes.tokenizer import ChatTokenizer
from rollout.episodes.turns import TurnSampler
from rollout.generator.jobs import STREAM_EACH_S, STREAM_S

Ask = Callable[[dict[str, Any]], Awaitable[str]]
Play = Callable[[int, list[float]], Awaitable[None]]
"""(number of the session, where the seconds of each turn go)."""


@dataclass
class Round:
    """The times of one path: the time of all sessions, of each turn, and the CPU's, clients included."""

    seconds: float = 0.0
    turns: list[float] = field(default_factory=list)
    cpu_s: float = 0.0


class Timer:
    """An engine that takes its time and answers with the same ids."""

    def __init__(self, tokens: int, tokenizer: ChatTokenizer) -> None:
        word = tokenizer.encode(" the")
        ids = (word * tokens)[: tokens - 1]
        self._ids = np.array([*ids, tokenizer.stop_ids[0]], np.int32)
        self.answer_s = 0.0
        self.piece_s = STREAM_S

    async def generate(
        self, request: Generate, ending: asyncio.Future[None] | None = None, read: Read | None = None
    ) -> Generated:
        tokens = len(self._ids)
        begin = time.perf_counter()
        if read is None:
            await asyncio.sleep(self.answer_s)
        else:
            pieces = max(1, int(self.answer_s / self.piece_s))
            for piece in range(pieces):
                await asyncio.sleep(begin + self.answer_s * (piece + 1) / pieces - time.perf_counter())
                start, end = tokens * piece // pieces, tokens * (piece + 1) // pieces
                read(start, self._ids[start : min(end, tokens - 1)].tolist())

        columns = {
            "token_ids": self._ids,
            "logp_behavior": np.full(tokens, -1.0, np.float32),
            "policy_version": np.zeros(tokens, np.int32),
        }

        return Generated(
            request_id=request.request_id,
            session=request.session,
            columns=columns,
            timeline=0,
            finish_reason="stop",
            tokens_generated=tokens,
            generator=0,
        )


def main(arguments: list[str]) -> None:
    parser = parser_of("gateway", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 128])
    parser.add_argument("--token-ms", type=float, default=2.0)
    parser.add_argument("--busy-token-ms", type=float, default=26.0)
    parser.add_argument("--sdk", action="store_true", help="ask with the SDK of OpenAI, which costs more than we do")
    options = parser.parse_args(arguments)

    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        tokenizer = ChatTokenizer(make_folder("qwen3", Path(folder) / "qwen3"))
        found = asyncio.run(_measure(tokenizer, options))
    write(options.out, {**found, "machine": machine()})


async def _measure(tokenizer: ChatTokenizer, options: Namespace) -> dict[str, dict[str, float]]:
    config = load_config(None, ["generator.max_model_len=8192", f"sampling.max_tokens={options.tokens}"])
    engine = Timer(options.tokens, tokenizer)
    gateway = Gateway()
    paths: dict[str, Play] = {
        "native": partial(_native, config, tokenizer, engine, options.turns),
        "gateway": partial(_gateway, config, tokenizer, engine, gateway, options.turns, False, options.sdk),
        "streaming": partial(_gateway, config, tokenizer, engine, gateway, options.turns, True, options.sdk),
    }

    found: dict[str, dict[str, float]] = {}
    for sessions in options.sessions:
        engine.answer_s = options.tokens * (options.token_ms if sessions == 1 else options.busy_token_ms) / 1000
        engine.piece_s = max(STREAM_S, STREAM_EACH_S * sessions)
        rounds = [
            {name: await _round(play, sessions, engine.answer_s) for name, play in paths.items()}
            for _ in range(options.rounds)
        ]

        for name in ("gateway", "streaming"):
            compared = found[f"{name}, {sessions} sessions"] = _compared(name, rounds)
            ratio, added, cpu = compared.values()
            print(f"{name:10} {sessions:4} sessions: {ratio:.3f} of the native tokens/s, ", end="")
            print(f"{added:+z.1f} ms at p50, {cpu:+z.2f} ms of CPU each turn")
    await gateway.stop()
    return found


async def _round(play: Play, sessions: int, answer_s: float) -> Round:
    """Sessions begin one after the other within the time of one answer, and so their turns end."""
    found = Round()

    async def one(number: int) -> None:
        await asyncio.sleep(answer_s * number / sessions)
        begin = time.perf_counter()
        await play(number, found.turns)
        found.seconds += time.perf_counter() - begin

    worked = time.process_time()
    await asyncio.gather(*(one(number) for number in range(sessions)))
    found.cpu_s = time.process_time() - worked
    return found


def _compared(name: str, rounds: list[dict[str, Round]]) -> dict[str, float]:
    """The figures compared with the native path of the same round; the median of the rounds."""
    pairs = [(each["native"], each[name]) for each in rounds]
    compared = {
        "tokens_per_s_ratio": [native.seconds / other.seconds for native, other in pairs],
        "added_p50_ms": [
            1000 * (statistics.median(other.turns) - statistics.median(native.turns)) for native, other in pairs
        ],
        "added_cpu_ms_per_turn": [1000 * (other.cpu_s - native.cpu_s) / len(other.turns) for native, other in pairs],
    }
    return {what: statistics.median(values) for what, values in compared.items()}


async def _native(
    config: Config, tokenizer: ChatTokenizer, engine: Timer, turns: int, number: int, seconds: list[float]
) -> None:
    sampler = _sampler(config, tokenizer, engine, number)
    conversation = Conversation(tokenizer, [ChatMessage("user", f"task {number}")])
    for _ in range(turns):
        begin = time.perf_counter()
        start = len(conversation)
        generated, _ = await sampler.turn(conversation)
        conversation.text(start, len(conversation))
        seconds.append(time.perf_counter() - begin)

        conversation.end_turn(Turn(start, len(conversation), 0.0, 0.0, 0.0, "stop", generated.generator), {})
        conversation.append_messages([ChatMessage("user", "go on")], limit=8191)


async def _gateway(
    config: Config,
    tokenizer: ChatTokenizer,
    engine: Timer,
    gateway: Gateway,
    turns: int,
    stream: bool,
    sdk: bool,
    number: int,
    seconds: list[float],
) -> None:
    forest = Forest(TurnReader(tokenizer, HermesParser()), limit=8192)
    session = Session(_sampler(config, tokenizer, engine, number), forest, grace_s=5)
    messages: list[dict[str, str]] = [{"role": "user", "content": f"task {number}"}]

    async with gateway.open(number, session) as endpoint, AsyncExitStack() as stack:
        ask = await _client(endpoint, stack, sdk)
        for _ in range(turns):
            begin = time.perf_counter()
            content = await ask({"model": "m", "messages": messages, "stream": stream})
            seconds.append(time.perf_counter() - begin)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "go on"}]
    assert len(forest.sequences()) == 1, forest.forks


async def _client(endpoint: Endpoint, stack: AsyncExitStack, sdk: bool) -> Ask:
    if sdk:
        client = await stack.enter_async_context(AsyncOpenAI(**endpoint.openai, max_retries=0))

        async def by_sdk(body: dict[str, Any]) -> str:
            answer: Any = await client.chat.completions.create(**body)
            if body["stream"]:
                return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
            return str(answer.choices[0].message.content)

        return by_sdk

    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    http = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))

    async def by_http(body: dict[str, Any]) -> str:
        async with http.post(f"{endpoint.base_url}/v1/chat/completions", json=body) as answer:
            if not body["stream"]:
                return str((await answer.json())["choices"][0]["message"]["content"])
            lines = [line.removeprefix(b"data: ") async for line in answer.content if line.startswith(b"data: {")]
            return "".join(json.loads(line)["choices"][0]["delta"].get("content", "") for line in lines)

    return by_http


def _sampler(config: Config, tokenizer: ChatTokenizer, engine: Timer, number: int) -> TurnSampler:
    ticket = Ticket(number + 1, 0, 0, 0, Version(0, 0))
    return TurnSampler(ticket, config, tokenizer.stop_ids, engine.generate)

"""Tokens per second through the whole rollout path against bare vLLM.

    python -m experiments.bench rollout [--rounds 5] [--requests 128] [--concurrency 64] [--out FILE.json]

A: `AsyncLLM.generate` in this process. B: client -> proxy process -> generator process -> vLLM and back, over
ipc sockets. Same prompts, concurrency, sampling parameters, model shape and dtype; A and B alternate, so drift of
the machine hits both. Both have two cores. The engine core of A is pinned to the first and its front end to the last
one. B's generator, in which vLLM's core is a thread, may use both, and its client and proxy share the last one with
it. Reported: medians over rounds, and the ratio of the
seconds of a token, by the clock and by the CPU of all processes. Target: at most 1 / 0.9 by the clock.
Every response runs to `--tokens`, so both sides do the same work whatever the weights are.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq

from experiments.bench._measuring import Timing, cpu_s_of, in_turns, parser_of, temporary_run, write
from experiments.bench._ratios import Idle, provenance, ratio_of
from rl.weights import make_sender
from rl.weights.channel import Placement, Sender
from rl.wire.messages import ClientHello, Generate, Generated, Message, Version, WeightNotice
from rl.wire.receiving import Malformed, Port
from rl.wire.run import ProcessContext, RunFile
from rl.wire.sockets import identity, open_socket, send
from rollout.episodes.generation import GenerationClient
from rollout.generator.engines.environment import engine_environment

_SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 768,
    "max_position_embeddings": 2048,
}
_PROMPT_TOKENS = 64
_START_S = 180.0
TARGET = round(1 / 0.9, 2)
_VERSION = Version(0, 0)


@dataclass(frozen=True)
class Side:
    """One way to run a request (the answer is its token count), and the processes that it keeps busy."""

    generate: Callable[[Generate], Awaitable[int]]
    engine: psutil.Process
    """vLLM's core, or the generator around it."""
    others: list[psutil.Process]

    def cpu_s(self) -> tuple[float, float]:
        """CPU seconds so far: of the engine's process, of everything else."""
        return cpu_s_of(self.engine), sum(map(cpu_s_of, self.others))


@dataclass
class Measured:
    """What each round measured on one side."""

    tokens_per_s: list[float] = field(default_factory=list)
    engine_cpu_us: list[float] = field(default_factory=list)  # per token
    other_cpu_us: list[float] = field(default_factory=list)  # per token

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(values) for name, values in vars(self).items()}

    def timings(self) -> list[Timing]:
        """The times of one token, all processes together."""
        columns = zip(self.tokens_per_s, self.engine_cpu_us, self.other_cpu_us, strict=True)
        return [Timing(1 / rate, 1e-6 * (engine + other)) for rate, engine, other in columns]


def main(argv: list[str]) -> None:
    options = _options(argv)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    overrides = [
        f"generator.dtype={options.dtype}",
        "generator.max_model_len=512",
        f"generator.max_num_seqs={options.concurrency}",
    ]

    with (
        tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder,
        temporary_run(overrides, model_folder=_save_model(Path(folder))) as run,
    ):
        os.environ.update(engine_environment(run.config, "cpu"), FRESCO_PARENT_PID=str(os.getpid()))
        with Idle() as idle:
            measured = asyncio.run(measure_sides(run, options, cores))
        os.sched_setaffinity(0, cores)  # the result names the machine by what this process may use
        _report(measured, idle, options)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = parser_of("rollout", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=128, help="per round and side")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of each response")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])

    return parser.parse_args(argv)


def _save_model(folder: Path) -> Path:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    Qwen3ForCausalLM(Qwen3Config(**_SHAPE, tie_word_embeddings=False)).save_pretrained(folder)
    return folder


async def measure_sides(
    run: RunFile,
    options: argparse.Namespace,
    cores: list[int] | None = None,
    told: Callable[[Mapping[str, Measured]], None] | None = None,
) -> dict[str, Measured]:
    """Both sides in turns; cores: to which both are pinned alike, None where there are enough. told: is called after
    each round of both."""
    async with contextlib.AsyncExitStack() as stack:
        bare = stack.enter_context(_bare(run))
        path = await stack.enter_async_context(_whole_path(run))
        sides = {"bare": bare, "path": path}
        if cores is not None:
            bare.engine.cpu_affinity(cores[:1])
            path.engine.cpu_affinity([cores[0], cores[-1]])
        measured = {name: Measured() for name in sides}

        for round_number, name in in_turns(sides, options.rounds, warm_up=1):
            rate, engine_us, other_us = await _round(sides[name], round_number, options)
            if round_number < 0:
                continue

            measured[name].tokens_per_s.append(rate)
            measured[name].engine_cpu_us.append(engine_us)
            measured[name].other_cpu_us.append(other_us)
            said = f"{rate:6.0f} tokens/s, CPU per token: engine {engine_us:4.0f} µs, others {other_us:4.0f} µs"
            print(f"round {round_number} {name}: {said}", flush=True)
            if told is not None and len({len(values.tokens_per_s) for values in measured.values()}) == 1:
                told(measured)

    return measured


def _report(measured: dict[str, Measured], idle: Idle, options: argparse.Namespace) -> None:
    medians = {name: values.medians() for name, values in measured.items()}
    for name, values in medians.items():
        print(f"median {name}: " + ", ".join(f"{key} {value:.0f}" for key, value in values.items()))
    ratio = ratio_of(measured["path"].timings(), measured["bare"].timings())
    verdict = ratio.verdict(at_most=TARGET, of="wall", idle=idle)
    print(f"seconds of a token, path over bare: {ratio}; {verdict}")

    rounds = {name: vars(values) for name, values in measured.items()}
    result = {"rounds": rounds, "median": medians, "verdict": verdict}
    write(options.out, result | provenance(idle, {"path_over_bare": ratio}))


async def _round(side: Side, round_number: int, options: argparse.Namespace) -> tuple[float, float, float]:
    """Tokens per second and CPU µs per token of `--requests` requests, `--concurrency` at a time."""
    random = np.random.default_rng(round_number + 1)
    slots = asyncio.Semaphore(options.concurrency)

    async def one(index: int) -> int:
        prompt = random.integers(1, _SHAPE["vocab_size"], _PROMPT_TOKENS, dtype=np.int32)
        session = (round_number + 2) * 1_000_000 + index
        async with slots:
            return await side.generate(Generate(0, session, "train", _VERSION, prompt, options.tokens, 1.0, 1.0, []))

    begin = time.perf_counter()
    cpu = side.cpu_s()
    tokens = sum(await asyncio.gather(*(one(index) for index in range(options.requests))))
    seconds = time.perf_counter() - begin

    assert tokens == options.requests * options.tokens
    engine_us, other_us = ((after - before) / tokens * 1e6 for after, before in zip(side.cpu_s(), cpu, strict=True))

    return tokens / seconds, engine_us, other_us


def _engine_core(pid: int) -> psutil.Process:
    (core,) = [child for child in psutil.Process(pid).children() if "EngineCore" in child.name()]
    return core


@contextlib.contextmanager
def _bare(run: RunFile) -> Iterator[Side]:
    from vllm.inputs.engine import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    from rollout.generator.engines.vllm_settings import engine_arguments, sampling_params

    engine = AsyncLLM.from_engine_args(engine_arguments(ProcessContext(run, 1, 0))[0])

    async def generate(request: Generate) -> int:
        prompt = tokens_input(request.prompt_ids.tolist())
        tokens = 0
        async for output in engine.generate(prompt, sampling_params(request), str(request.session)):
            tokens += len(output.outputs[0].token_ids)
        return tokens

    try:
        yield Side(generate, _engine_core(os.getpid()), [psutil.Process()])
    finally:
        engine.shutdown(timeout=5)


@contextlib.asynccontextmanager
async def _whole_path(run: RunFile) -> AsyncIterator[Side]:
    """Proxy and generator as the supervisor starts them; this process stands in for supervisor, broker and learner."""
    sinks = [
        open_socket(zmq.ROUTER, run, "control", bind=True),
        open_socket(zmq.ROUTER, run, "usage", bind=True),
        open_socket(zmq.ROUTER, run, "weight_status", bind=True),
    ]
    notices = open_socket(zmq.DEALER, run, "notices", 0, identity=identity("learner", 0))
    sender = _sender(run)

    children = [
        subprocess.Popen([sys.executable, "-m", module, "--run", str(run.folder)])
        for module in ("rollout.proxy.process", "rollout.generator.process")
    ]
    drain = asyncio.create_task(_drain(sinks))

    def answered(message: Message, _peer: bytes) -> None:
        assert isinstance(message, Generated)
        client.answered(message)

    def failed(error: Exception) -> None:
        raise error

    socket = open_socket(zmq.DEALER, run, "frontend", identity=identity("env_server", 0))
    frontend = Port(socket, answered, Malformed("bench"), failed)
    client = GenerationClient(frontend.send, 30.0)

    try:
        frontend.send(ClientHello(0, 0))
        _publish(run, sender)
        send(notices, WeightNotice(_VERSION, []))
        first = Generate(0, 0, "train", _VERSION, np.arange(1, 9, dtype=np.int32), 4, 1.0, 1.0, [])
        await asyncio.wait_for(client.generate(first), _START_S)

        async def generate(request: Generate) -> int:
            answer = await client.generate(request)
            assert answer.finish_reason == "length", answer.error
            return answer.token_ids.size

        proxy, generator = (psutil.Process(child.pid) for child in children)
        yield Side(generate, generator, [psutil.Process(), proxy])
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait(10)

        drain.cancel()
        sender.close()
        frontend.close()
        for each in (*sinks, notices):
            each.close(linger=0)


def _weights(run: RunFile) -> dict[str, Any]:
    from safetensors.torch import load_file

    assert run.model_folder is not None
    return load_file(run.model_folder / "model.safetensors")


def _sender(run: RunFile) -> Sender:
    dtype = run.config.generator.dtype
    sender = make_sender(run, 0, [(name, tuple(tensor.shape), dtype) for name, tensor in _weights(run).items()])
    sender.open()
    return sender


def _publish(run: RunFile, sender: Sender) -> None:
    weights = _weights(run)
    sender.offer(_VERSION.n, ((name, tensor, Placement(tuple(tensor.shape))) for name, tensor in weights.items()))
    sender.announce(_VERSION)


async def _drain(sinks: list[zmq.Socket[bytes]]) -> None:
    while True:
        for socket in sinks:
            with contextlib.suppress(zmq.Again):
                while True:
                    socket.recv_multipart(zmq.DONTWAIT)
        await asyncio.sleep(0.2)

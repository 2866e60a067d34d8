"""vLLM on one GPU: a weight update stage by stage, how far engine and learner are apart, and tokens a second.

The last are those of Fresco's path beside vLLM alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.bench import rollout as bench
from experiments.bench._measuring import temporary_run
from experiments.gpu.learner import finished, one_rank
from experiments.gpu.models import save_model
from experiments.gpu.part import Result, need_vllm
from rl.config.lora import lora_options
from rl.learner.publish import probe_logp, served, weight_entries
from rl.models.packing import sequence_pack
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions
from rl.weights import make_sender
from rl.weights.channel import Sender, bytes_of
from rl.weights.device.blocks import make_block
from rl.wire.messages import Generate, Version
from rl.wire.run import ProcessContext, RunFile
from rollout.generator.engines.environment import engine_environment

_UPDATES = 8  # the first four with an idle engine; to the fifth one requests are still being added
_STEADY = 5
_EAGER = "generator.options.enforce_eager=true"  # an engine starts in a third of the time
_SIZE = {"cuda": "1.5b", "cpu": "tiny"}
_RUNNING = {"cuda": 128, "cpu": 4}
_COMPARED = {"cuda": (32, 256), "cpu": (2, 8)}  # requests, and tokens of each
_NOISE = 1e-3  # added to each parameter between two versions
_GAP_OF = ("ipc", "adapter")  # the channel does not matter to it
_READS = """import json, sys, torch
from rl.weights.device.blocks import Handle, map_block
block = map_block(Handle(*json.loads(sys.argv[1])), torch.device(sys.argv[2]))
assert block.data.tolist() == [7] * 8, block.data"""
"""What another process does with a block."""


def weights(result: Result, device: str) -> None:
    """Eight updates of an engine by each channel, from fp32 master weights; bare copies of the same bytes.

    The learner is on the engine's GPU; for nccl it is on a second one, where there is one. ipc is between this process
    and that of vLLM's core. Engines have CUDA graphs, as in a run: a pause waits for the steps that have begun, and
    those of an eager engine take several times as long.
    """
    need_vllm()
    apart = device == "cpu" or torch.cuda.device_count() > 1
    with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        model = save_model(_SIZE[device], Path(folder), device, tied=False)
        for channel in ("ipc", "shm", "nccl") if apart else ("ipc", "shm"):
            with result.case(channel):
                if channel == "ipc":
                    _read_elsewhere(device)
                    result.note("ipc between two processes", "works")
                _with_engine(result, model, device, channel, [f"weights.transport={channel}"])


def frames(result: Result, device: str) -> None:
    """As `weights`, by encrypted frames, which one machine does not need; of an eager engine."""
    need_vllm()
    with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        model = save_model(_SIZE[device], Path(folder), device, tied=False)
        _with_engine(result, model, device, "zmq", ["weights.transport=zmq", _EAGER])


def adapters(result: Result, device: str) -> None:
    """As `weights`, of an eager engine that is sent adapters alone, through shared memory."""
    need_vllm()
    with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder:
        model = save_model(_SIZE[device], Path(folder), device, tied=False)
        _with_engine(result, model, device, "adapter", ["model.lora={rank: 16, serve: adapter}", _EAGER])


def _read_elsewhere(device: str) -> None:
    """Raises RuntimeError where no other process can read what this one has on the device: no engine could, either."""
    here = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
    block = make_block(8, here)
    block.data.fill_(7)
    finished(device)
    command = [sys.executable, "-c", _READS, json.dumps(block.handle), str(here)]
    read = subprocess.run(command, capture_output=True, text=True, timeout=60)
    block.close()
    if read.returncode:
        raise RuntimeError(f"another process cannot read a block of this one's:\n{read.stderr[-1000:]}")


def _with_engine(result: Result, model: Path, device: str, name: str, settings: Sequence[str]) -> None:
    with temporary_run([*_settings(device, 256), *settings], device=device, model_folder=model) as run:
        os.environ.update(engine_environment(run.config, device))
        asyncio.run(_updates(result, run, name))


def rollout(result: Result, device: str) -> None:
    """Proxy and generator beside bare AsyncLLM, in turns: two engines on one GPU."""
    need_vllm()
    requests, tokens, rounds = (256, 512, 3) if device == "cuda" else (4, 8, 1)
    options = argparse.Namespace(rounds=rounds, requests=requests, concurrency=requests, tokens=tokens)
    for size in ("1.5b", "0.5b") if device == "cuda" else ("tiny",):
        with tempfile.TemporaryDirectory(prefix="fresco-gpu-") as folder, result.case(size):
            model = save_model(size, Path(folder), device, tied=False)
            settings = _settings(device, requests)
            with temporary_run(settings, device=device, model_folder=model) as run:
                os.environ.update(engine_environment(run.config, device), FRESCO_PARENT_PID=str(os.getpid()))
                asyncio.run(bench.measure_sides(run, options, told=partial(_note_round, result, size)))


def _note_round(result: Result, size: str, measured: Mapping[str, bench.Measured]) -> None:
    """What all rounds have measured so far."""
    found: dict[str, Any] = {name: vars(values) for name, values in measured.items()}
    rates = {name: statistics.median(values.tokens_per_s) for name, values in measured.items()}
    result.note(size, found | {"path_over_bare": rates["path"] / rates["bare"]})


def _settings(device: str, sequences: int) -> list[str]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    cache = 8_000_000_000 if device == "cuda" else 64_000_000
    return [
        f"generator.dtype={dtype}",
        f"model.dtype={dtype}",
        "generator.max_model_len=2048",
        f"generator.max_num_seqs={sequences}",
        f"generator.options.kv_cache_bytes={cache}",
        "generator.options.gpu_memory_utilization=0.4",
        "weights.deadline_s=120",
    ]


async def _updates(result: Result, run: RunFile, name: str) -> None:
    from rollout.generator.engines.vllm import VllmEngine

    engine = VllmEngine(ProcessContext(run, 0, 0))
    begin = time.perf_counter()
    await engine.start()
    result.note(f"{name} engine_start_s", time.perf_counter() - begin)

    # Where vLLM's core is in this process, as on a CPU, it has ranks of its own there.
    on_gpu = run.device == "cuda"
    with one_rank(run.device, int(name == "nccl")) if on_gpu else contextlib.nullcontext():
        await _updated(result, run, name, engine)


async def _updated(result: Result, run: RunFile, name: str, engine: Any) -> None:
    assert run.model_folder is not None
    options = ModelOptions(dtype=getattr(torch, run.config.model.dtype), lora=lora_options(run.config.model))
    policy = Policy.load(run.model_folder, None, run.device, options)
    entries = weight_entries(policy, run)
    result.note("bytes", bytes_of(entries))
    result.note("bare_copies_s", _bare_copies(bytes_of(entries), run.device))

    sender = make_sender(run, 0, entries)
    sender.open()
    clients: list[asyncio.Task[None]] = []
    seconds: list[dict[str, float]] = []
    try:
        for n in range(_UPDATES):
            told = await _update(n, engine, policy, sender)
            seconds.append(told["seconds"])
            result.note(f"{name} update {n}", {"running": len(clients)} | told)

            if n == _UPDATES - 1:
                result.note(f"{name} median", _medians_ms(seconds[_STEADY:]))
                if name in _GAP_OF:
                    result.note(f"{name} gap_nats", await _gap(engine, policy, n))
            with torch.no_grad():
                for _, parameter in policy.trainable():
                    parameter.add_(torch.randn_like(parameter) * _NOISE)

            if n == _UPDATES // 2 - 1:
                ids = itertools.count(1)
                clients = [asyncio.create_task(_generate(engine, ids)) for _ in range(_RUNNING[run.device])]

    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await engine.stop()
        sender.close()


async def _update(n: int, engine: Any, policy: Policy, sender: Sender) -> dict[str, Any]:
    """One version from the learner's parameters to the engine's, and whether it arrived. `publish` is what a run calls
    `time/publish`: until the version is announced."""
    version, probe = Version(0, n), list(range(1, 65))
    stages = {}
    if policy.device.type == "cuda":
        torch.cuda.synchronize()  # the noise was added before
    begin = time.perf_counter()
    known = probe_logp(policy, probe)
    stages["probe"] = time.perf_counter() - begin

    offered = time.perf_counter()
    sender.offer(n, served(policy, sender.run))
    stages["offer"] = time.perf_counter() - offered

    waited = time.perf_counter()
    receipt = sender.receipt(n)
    stages["receipt"] = time.perf_counter() - waited
    sender.announce(version)
    stages["publish"] = time.perf_counter() - begin

    begin = time.perf_counter()
    status = await engine.load(version, probe)
    stages["load"] = time.perf_counter() - begin

    gap = np.abs(np.array(known) - np.array(status.probe_logp))
    stages |= {f"engine_{name}": seconds for name, seconds in status.seconds.items()}
    arrived = {"same_checksum": status.checksum == receipt, "probe_gap_mean": float(gap.mean())}
    return {"seconds": stages} | arrived


def _medians_ms(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Of each stage."""
    return {f"{stage}_ms": 1e3 * statistics.median(each[stage] for each in updates) for stage in updates[0]}


async def _gap(engine: Any, policy: Policy, n: int) -> dict[str, float]:
    """Between engine and learner, over tokens that the engine samples under the weights of both: what `exact/max` and
    the limits of alarms are of, at this size."""
    requests, tokens = _COMPARED[policy.device.type]
    random = np.random.default_rng(n)
    prompts = [random.integers(1, 1000, 64, dtype=np.int32) for _ in range(requests)]
    asked = [
        Generate(-1 - i, -1 - i, "train", Version(0, n), prompt, tokens, 1.0, 1.0, [])
        for i, prompt in enumerate(prompts)
    ]
    answers = await asyncio.gather(*(engine.generate(each, lambda sampled: None) for each in asked))

    gaps = []
    for prompt, sampled in zip(prompts, answers, strict=True):
        with torch.no_grad():
            logp = policy(sequence_pack([*prompt.tolist(), *sampled.token_ids]).to(policy.device)).logp
        gaps.append(np.abs(logp[len(prompt) :].float().cpu().numpy() - np.array(sampled.logp)))
    gap = np.concatenate(gaps)
    figures = {"mean": gap.mean(), "root_mean_square": np.sqrt((gap**2).mean()), "largest": gap.max()}
    return {"tokens": len(gap)} | {name: float(value) for name, value in figures.items()}


async def _generate(engine: Any, ids: itertools.count[int]) -> None:
    prompt = np.arange(1, 65, dtype=np.int32)
    while True:
        n = next(ids)
        await engine.generate(Generate(n, n, "train", Version(0, 0), prompt, 256, 1.0, 1.0, []), lambda sampled: None)


def _bare_copies(count: int, device: str) -> dict[str, float]:
    """Seconds for the same bytes: within the device, and between it and the host, pinned and not."""
    here, there = (torch.empty(count, dtype=torch.uint8, device=device) for _ in range(2))
    paged = torch.zeros(count, dtype=torch.uint8)
    pairs = {"device_to_device": (there, here), "device_to_paged": (paged, here), "paged_to_device": (here, paged)}
    if device == "cuda":
        pinned = torch.empty(count, dtype=torch.uint8, pin_memory=True)
        pairs |= {"device_to_pinned": (pinned, here), "pinned_to_device": (here, pinned)}

    found = {}
    for name, (target, source) in pairs.items():
        for _ in range(2):  # the first one touches the pages
            begin = time.perf_counter()
            target.copy_(source)
            with contextlib.suppress(RuntimeError, AssertionError):
                torch.cuda.synchronize()
            found[name] = time.perf_counter() - begin
    return found

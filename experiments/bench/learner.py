"""Tokens per second of a learner step against a bare FSDP loop, and the time to publish a version.

    python -m experiments.bench learner [--rounds 15] [--groups 2] [--device cpu] [--out FILE.json]

A: torch and transformers only: packed forward, clipped loss, backward, clip, AdamW, on packs that were made
before. B: what the learner does for a batch from the wire: decode, advantages, packs, gradients with diagnostics,
clip, AdamW, metrics. Same model, packs, dtype and rank (one); both run the head on generated positions only.
Rounds are short and alternate A B, B A, so drift of the machine hits both; the ratio is the median of the rounds'
own ratios, in wall time and in CPU time (the steadier one on a busy machine). Target: ratio >= 0.90.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rl.core.columns import token_columns
from rl.core.config import load_config
from rl.core.messages import SampleRow, Shard, decode, encode
from rl.core.process import Process
from rl.core.run import ProcessContext, RunFile
from rl.learner.link import LearnerLink
from rl.learner.packing import Pack
from rl.learner.process import Learner
from rl.learner.publish import Publisher
from rl.learner.update import UpdateStats

TARGET = 0.90
_VOCAB = 1024
_GROUP_SIZE = 8


def make_run(folder: Path, arguments: argparse.Namespace) -> RunFile:
    """A run of one rank with a new random model of `arguments.hidden`."""
    hidden = arguments.hidden
    config = Qwen3Config(
        vocab_size=_VOCAB, hidden_size=hidden, num_hidden_layers=arguments.layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, intermediate_size=3 * hidden, max_position_embeddings=4096,
        tie_word_embeddings=False,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder / "source")
    overrides = [
        "learner.kind=fsdp", f"model.dtype={arguments.dtype}", f"generator.dtype={arguments.dtype}", "steps=100000",
        "learner.max_tokens_per_pack=1024", f"rollout.groups_per_batch={arguments.groups}",
        f"rollout.group_size={_GROUP_SIZE}", "learner.lr=1e-6",
    ]  # fmt: skip
    run = RunFile(
        config=load_config(None, overrides), run_id=f"{time.time_ns() & 0xFFFFFFFF:08x}", folder=folder,
        socket_folder=folder, device=arguments.device, model_folder=folder / "source", train_tasks=1, eval_tasks=0,
        started_at=time.time(),
    )  # fmt: skip
    run.save()
    return run


def make_shard(groups: int) -> Shard:
    """Samples of a 64-token prompt and 32 to 128 generated tokens, step 0."""
    random = np.random.default_rng(0)
    count = groups * _GROUP_SIZE
    answers = random.integers(32, 129, count)
    lengths = [64 + int(answer) for answer in answers]
    mask = np.concatenate([np.repeat(np.array([0, 1], np.uint8), [64, answer]) for answer in answers])
    rows = [
        SampleRow(i, i // _GROUP_SIZE, float(random.random()), lengths[i], int(answers[i]), 0) for i in range(count)
    ]
    return Shard(
        step=0,
        rank=0,
        epoch=0,
        rows=rows,
        members=list(range(count)),
        lengths=lengths,
        turn_starts=[[64]] * count,
        columns=token_columns(random.integers(0, _VOCAB, len(mask)), mask, logp_behavior=-7.0, policy_version=0),
        loss_tokens=int(answers.sum()),
    )


def bare_step(run: RunFile, packs: list[Pack], tokens: int) -> Callable[[], None]:
    """One step of the bare loop over these packs."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[run.config.model.dtype]
    model: Any = AutoModelForCausalLM.from_pretrained(str(run.model_folder), dtype=torch.float32).train()
    mesh = init_device_mesh(run.device, (1,))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(model, mesh=mesh, mp_policy=precision)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-6, betas=(0.9, 0.95))
    packs = [pack.to(run.device) for pack in packs]

    def step() -> None:
        for pack in packs:
            wanted = pack.mask.nonzero()[:, 0]  # (S,) generated tokens; the logits before each predict it
            logits = model(
                pack.token_ids[None], position_ids=pack.position_ids[None], use_cache=False, logits_to_keep=wanted - 1
            ).logits[0]  # (S, vocab)
            logp = -F.cross_entropy(logits.float(), pack.token_ids[wanted], reduction="none")
            ratio = (logp - pack.logp_behavior[wanted]).exp()
            advantages = pack.advantages[wanted]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / tokens
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def fresco_step(learner: Learner, link: LearnerLink, frames: list[bytes | memoryview]) -> None:
    """The training part of `rl.learner.process.train`, from the frames of a shard to its metrics row."""
    shard = decode(frames)
    assert isinstance(shard, Shard)
    stats = UpdateStats()
    for minibatch in learner.trainer.minibatches(shard):
        stats.add(learner.trainer.update(minibatch, shard.step))
    stats.all_reduce()
    link.report(shard, stats.metrics())


def timed(work: Callable[[], None], device: str) -> tuple[float, float]:
    """(wall, CPU) seconds of one call."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def measure(run: RunFile, rounds: int) -> dict[str, Any]:
    process = Process("learner", ProcessContext(run, 0, 0))  # not entered: there is no supervisor
    learner = Learner(process)
    link = LearnerLink(process, learner.manifest)
    publisher = Publisher(learner.policy, learner.manifest, link)
    shard = make_shard(run.config.rollout.groups_per_batch)
    frames = encode(shard)
    packs = [pack for minibatch in learner.trainer.minibatches(shard) for pack in minibatch.packs]
    bare = bare_step(run, packs, shard.loss_tokens)
    versions = itertools.count()
    samples: dict[str, list[tuple[float, float]]] = {"bare": [], "fresco": [], "publish": []}
    work: dict[str, Callable[[], None]] = {
        "bare": bare,
        "fresco": lambda: fresco_step(learner, link, frames),
        "publish": lambda: publisher.publish(link.version(next(versions))),
    }
    order = ["bare", "fresco", "publish"]
    for name in order:  # warm up
        work[name]()
    for number in range(rounds):
        for name in order if number % 2 else ["fresco", "bare", "publish"]:
            samples[name].append(timed(work[name], run.device))
    link.close()
    dist.destroy_process_group()
    tokens = sum(shard.lengths)
    seconds = {name: statistics.median(pair[0] for pair in pairs) for name, pairs in samples.items()}
    ratios = [
        [a / b for a, b in zip(*pairs, strict=True)] for pairs in zip(samples["bare"], samples["fresco"], strict=True)
    ]
    return {
        "device": run.device,
        "rounds": rounds,
        "batch_tokens": tokens,
        "packs": len(packs),
        "parameters": sum(parameter.numel() for parameter in learner.policy.parameters()),
        "bare_tokens_per_s": tokens / seconds["bare"],
        "fresco_tokens_per_s": tokens / seconds["fresco"],
        "ratio": statistics.median(wall for wall, _ in ratios),
        "ratio_cpu": statistics.median(cpu for _, cpu in ratios),
        "publish_s": seconds["publish"],
        "publish_bytes": learner.manifest.total_bytes,
        "target": TARGET,
    }


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench learner")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        result = measure(make_run(Path(folder), arguments), arguments.rounds)
    print(f"{result['parameters'] / 1e6:.1f}M parameters, {result['batch_tokens']} tokens in {result['packs']} packs")
    print(f"bare FSDP loop  {result['bare_tokens_per_s']:8.0f} tokens/s")
    print(f"fresco learner  {result['fresco_tokens_per_s']:8.0f} tokens/s")
    verdict = "met" if result["ratio"] >= TARGET else "missed"
    print(f"ratio {result['ratio']:.3f} (CPU time {result['ratio_cpu']:.3f}); target {TARGET:.2f} {verdict}")
    print(f"publish {result['publish_s'] * 1e3:.1f} ms for {result['publish_bytes'] / 1e6:.1f} MB, probe included")
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")

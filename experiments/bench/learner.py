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
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from experiments.bench._measuring import Work, alternate, parser_of, random_shard, temporary_run, write
from rl.core.messages import Shard, decode, encode
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


def run_fields(folder: Path, arguments: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Overrides and fields of a run of one rank with a new random model of `arguments.hidden`."""
    config = Qwen3Config(
        vocab_size=_VOCAB,
        hidden_size=arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=3 * arguments.hidden,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)

    overrides = [
        "learner.kind=fsdp",
        f"model.dtype={arguments.dtype}",
        f"generator.dtype={arguments.dtype}",
        "steps=100000",
        "learner.max_tokens_per_pack=1024",
        f"rollout.groups_per_batch={arguments.groups}",
        f"rollout.group_size={_GROUP_SIZE}",
        "learner.lr=1e-6",
    ]
    return overrides, {"device": arguments.device, "model_folder": folder}


def bare_step(run: RunFile, packs: list[Pack], tokens: int) -> Work:
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


def synchronised(work: Callable[[], object], device: str) -> Work:
    """`work`, whose end is awaited on a GPU, too."""

    def run() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def measure(run: RunFile, rounds: int) -> dict[str, Any]:
    """Tokens a second of both sides, and the medians of the rounds' ratios."""
    process = Process("learner", ProcessContext(run, 0, 0))  # not entered: there is no supervisor
    learner = Learner(process)
    link = LearnerLink(process, learner.manifest)
    publisher = Publisher(learner.policy, learner.manifest, link)
    versions = itertools.count()

    shard = random_shard(run.config.rollout.groups_per_batch, _GROUP_SIZE, 64, (32, 128), _VOCAB)
    frames = encode(shard)
    packs = [pack for minibatch in learner.trainer.minibatches(shard) for pack in minibatch.packs]
    works = {
        "bare": bare_step(run, packs, shard.loss_tokens),
        "fresco": lambda: fresco_step(learner, link, frames),
        "publish": lambda: publisher.publish(link.version(next(versions))),
    }
    measured = alternate({name: synchronised(work, run.device) for name, work in works.items()}, rounds, warm_up=1)
    link.close()
    dist.destroy_process_group()

    tokens = sum(shard.lengths)
    seconds = {name: statistics.median(one.wall_s for one in timings) for name, timings in measured.items()}
    pairs = list(zip(measured["bare"], measured["fresco"], strict=True))
    return {
        "device": run.device,
        "rounds": rounds,
        "batch_tokens": tokens,
        "packs": len(packs),
        "parameters": sum(parameter.numel() for parameter in learner.policy.parameters()),
        "bare_tokens_per_s": tokens / seconds["bare"],
        "fresco_tokens_per_s": tokens / seconds["fresco"],
        "ratio": statistics.median(bare.wall_s / fresco.wall_s for bare, fresco in pairs),
        "ratio_cpu": statistics.median(bare.cpu_s / fresco.cpu_s for bare, fresco in pairs),
        "publish_s": seconds["publish"],
        "publish_bytes": learner.manifest.total_bytes,
        "target": TARGET,
    }


def main(argv: list[str]) -> None:
    parser = parser_of("learner", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args(argv)

    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        overrides, fields = run_fields(Path(folder), arguments)
        with temporary_run(overrides, **fields) as run:
            result = measure(run, arguments.rounds)

    print(f"{result['parameters'] / 1e6:.1f}M parameters, {result['batch_tokens']} tokens in {result['packs']} packs")
    print(f"bare FSDP loop  {result['bare_tokens_per_s']:8.0f} tokens/s")
    print(f"fresco learner  {result['fresco_tokens_per_s']:8.0f} tokens/s")
    verdict = "met" if result["ratio"] >= TARGET else "missed"
    print(f"ratio {result['ratio']:.3f} (CPU time {result['ratio_cpu']:.3f}); target {TARGET:.2f} {verdict}")
    print(f"publish {result['publish_s'] * 1e3:.1f} ms for {result['publish_bytes'] / 1e6:.1f} MB, probe included")
    write(arguments.out, result)

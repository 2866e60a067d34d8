"""Seconds of a learner step over those of a bare loop, and the time to publish a version.

    python -m experiments.bench learner [--lengths mixed|equal|prompts] [--rounds 15] [--groups 2] [--out FILE.json]

A: torch and transformers only: forward, clipped loss, backward, clip, fused AdamW, on tensors that were made before.
B: what the learner does for a batch from the wire: decode, advantages, packs, gradients with diagnostics, clip, fused
AdamW, metrics. Same model, samples, dtype and rank (one, unwrapped where the learner is); both run the head on
generated positions only, and neither computes attention between samples or on padding.

`equal`: 128 samples of 10 tokens for each two groups. A runs them as one stock batch, (samples, length) with torch's
own causal attention. `mixed`: 96 to 192 tokens. A runs the packs of B with its attention: what a stock batch would
lose by padding is not counted for us. `prompts`: eight answers of 4 to 12 tokens to each prompt of 48. A computes each
prompt eight times, as stock loops do; the learner computes it once.

Rounds are short and alternate A B, B A, so drift of the machine hits both. The ratio is the median of the rounds' own
ratios, in wall time and in CPU time. Target: at most 1.05 in CPU time.
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
from transformers import Qwen3Config, Qwen3ForCausalLM

from experiments.bench._bare_loop import BareLoop
from experiments.bench._measuring import Work, alternate, parser_of, random_batch_part, temporary_run, write
from experiments.bench._ratios import Idle, provenance, ratio_of
from rl.learner.process import Learner
from rl.learner.publish import Publisher
from rl.learner.run_client import RunClient
from rl.learner.update import UpdateStats
from rl.models.packing import Pack
from rl.weights.channel import bytes_of
from rl.wire.messages import BatchPart, decode, encode
from rl.wire.process import Process
from rl.wire.run import ProcessContext, RunFile

TARGET = 1.05
_VOCAB = 1024
_GROUP_SIZE = {"equal": 64, "mixed": 8, "prompts": 8}
_TOKENS = {"equal": (6, (4, 4)), "mixed": (64, (32, 128)), "prompts": (48, (4, 12))}
"""The tokens of a prompt, and the range of an answer's."""


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
        f"rollout.group_size={_GROUP_SIZE[arguments.lengths]}",
        "learner.lr=1e-6",
    ]
    return overrides, {"device": arguments.device, "model_folder": folder}


def bare_step(run: RunFile, packs: list[Pack], tokens: int, *, equal: bool) -> Work:
    """One step of the bare loop over these packs."""
    loop = BareLoop(run, "stock" if equal else "packed")
    packs = loop.prepared(packs)
    return lambda: loop.step(packs, tokens)


def fresco_step(learner: Learner, client: RunClient, frames: list[bytes | memoryview]) -> None:
    """The training part of `rl.learner.process.train`, from the frames of a batch part to its metrics row."""
    batch_part = decode(frames)
    assert isinstance(batch_part, BatchPart)
    stats = UpdateStats()
    learner.token_log.batch(batch_part)
    for minibatch in learner.trainer.minibatches(batch_part):
        stats.add(learner.trainer.update(minibatch, batch_part.step))
    stats.all_reduce()
    learner.token_log.write_batch()
    client.report(batch_part, stats.metrics(), stats.histograms())


def synchronised(work: Callable[[], object], device: str) -> Work:
    """`work`, whose end is awaited on a GPU, too."""

    def run() -> None:
        work()
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def measure(run: RunFile, rounds: int, kind: str) -> dict[str, Any]:
    """Tokens a second of both sides, and the medians of the rounds' ratios."""
    process = Process("learner", ProcessContext(run, 0, 0))  # not entered: there is no supervisor
    learner = Learner(process)
    client = RunClient(process, learner.entries, 0)
    publisher = Publisher(learner.policy, client)
    versions = itertools.count()

    prompt, answer = _TOKENS[kind]
    rollout = run.config.rollout
    shared = kind == "prompts"
    batch_part = random_batch_part(rollout.groups_per_batch, rollout.group_size, prompt, answer, _VOCAB, shared=shared)
    frames = encode(batch_part)
    packs = [pack for minibatch in learner.trainer.minibatches(batch_part) for pack in minibatch.packs]

    works = {
        "bare": bare_step(run, packs, batch_part.loss_tokens, equal=kind == "equal"),
        "fresco": lambda: fresco_step(learner, client, frames),
        "publish": lambda: publisher.publish(next(versions)),
    }
    with Idle() as idle:
        measured = alternate({name: synchronised(work, run.device) for name, work in works.items()}, rounds, warm_up=1)
    client.close()
    dist.destroy_process_group()

    tokens = sum(batch_part.lengths)
    seconds = {name: statistics.median(one.wall_s for one in timings) for name, timings in measured.items()}
    ratio = ratio_of(measured["fresco"], measured["bare"])

    sizes = {
        "batch_tokens": tokens,
        "packs": len(packs),
        "parameters": sum(parameter.numel() for _, parameter in learner.policy.trainable()),
    }

    result = sizes | {
        "bare_tokens_per_s": tokens / seconds["bare"],
        "fresco_tokens_per_s": tokens / seconds["fresco"],
        "fresco_over_bare": str(ratio),
        "verdict": ratio.verdict(at_most=TARGET, of="cpu", idle=idle),
    }

    result["publish_s"] = seconds["publish"]
    result["publish_bytes"] = bytes_of(learner.entries)
    return result | {"device": run.device, "rounds": rounds} | provenance(idle, {"fresco_over_bare": ratio})


def main(argv: list[str]) -> None:
    parser = parser_of("learner", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--lengths", choices=list(_TOKENS), default="mixed")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args(argv)

    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        overrides, fields = run_fields(Path(folder), arguments)
        with temporary_run(overrides, **fields) as run:
            result = measure(run, arguments.rounds, arguments.lengths)

    print(f"{result['parameters'] / 1e6:.1f}M parameters, {result['batch_tokens']} tokens in {result['packs']} packs")
    print(f"bare loop       {result['bare_tokens_per_s']:8.0f} tokens/s")
    print(f"fresco learner  {result['fresco_tokens_per_s']:8.0f} tokens/s")
    print(f"fresco over bare: {result['fresco_over_bare']}; {result['verdict']}")
    print(f"machine: {result['machine']}")
    print(f"publish {result['publish_s'] * 1e3:.1f} ms for {result['publish_bytes'] / 1e6:.1f} MB, probe included")
    write(arguments.out, result)

"""Experts sharded as FSDP units of their own, beside units of whole layers: peak memory and time of a step.

python -m experiments.bench experts [--ranks 2] [--layers 4] [--experts 32] [--steps 5] [--out FILE.json]

Each variant has processes of its own, which speak gloo. The peak is of the forward and the backward, above what the
weights take.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM

from experiments.bench._measuring import parser_of, write
from experiments.bench._ratios import machine
from rl.models import policy as policies
from rl.models.loading import empty_model, read_weights
from rl.models.packed_attention import NAME
from rl.models.packing import sequence_pack
from rl.models.policy import Policy, shard_policy
from rl.models.protocol import ModelOptions

VARIANTS = ("layers", "experts")
_TOKENS = 512


def main(argv: list[str]) -> None:
    parser = parser_of("experts", __doc__)
    for name, default in {"ranks": 2, "layers": 4, "experts": 32, "steps": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args(argv)

    found = {}
    with tempfile.TemporaryDirectory(prefix="fresco-bench-") as folder:
        save_model(folder, options.layers, options.experts)
        for variant in VARIANTS:
            multiprocessing.spawn(rank_main, (folder, variant, options), nprocs=options.ranks)
            found[variant] = torch.load(f"{folder}/{variant}.pt")
            print(f"{variant}: {found[variant]['step_s']:.2f} s a step, peak {found[variant]['peak_mib']:.0f} MiB")
    write(options.out, {"variants": found, "machine": machine(), "date": time.strftime("%Y-%m-%d")})


def save_model(folder: str, layers: int, experts: int) -> None:
    config: Any = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=1024,
        hidden_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=128,
        num_experts=experts,
        num_experts_per_tok=4,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def rank_main(rank: int, folder: str, variant: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/{variant}.store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=options.ranks)
    mesh = init_device_mesh("cpu", (options.ranks,))

    policy = Policy(empty_model(folder, NAME)).train()
    if variant == "layers":
        policies.expert_stacks = lambda layer: []
    shard_policy(policy, ModelOptions(activation_checkpointing=True), mesh=mesh)
    read_weights(policy.model, Path(folder))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    random = torch.Generator().manual_seed(rank)
    pack = sequence_pack(torch.randint(3, 1024, (_TOKENS,), generator=random).tolist())
    seconds = []
    for _ in range(options.steps + 1):
        begin = time.perf_counter()
        policy(pack).logp.sum().backward()
        policy.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - begin)

    peak = torch.tensor((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        torch.save({"step_s": statistics.median(seconds[1:]), "peak_mib": float(peak)}, f"{folder}/{variant}.pt")
    dist.destroy_process_group()

"""What each loss costs, as a share of a learner step on the CPU recipe.

    python -m experiments.bench losses [--rounds 9] [--out FILE.json]

A learner step is what the CPU recipe does with a batch: forward, loss, backward, clip and AdamW over its packs, one
rank, one thread, its model and lengths. The loss's share is its value and its own derivative on the same packs;
loss and step alternate, and the median of the rounds' ratios is printed (target: at most 0.05 each). `proximal` is the
forward that a loss which needs recomputed log-probabilities adds where a batch has more than one minibatch (the recipe
has one: its step's own log-probabilities are those); `decoupled_ppo` with `proximal: interpolated` does without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from algos.registry import Loss, loss_names, make_loss
from algos.types import LossInputs
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.core.columns import token_columns
from rl.core.config import load_config
from rl.core.messages import SampleRow, Shard
from rl.learner.trainer import Trainer
from rl.learner.update import loss_inputs, with_logp

TARGET = 0.05
_RECIPE = Path(__file__).parent.parent / "math_cpu.yaml"


def make_shard(groups: int, size: int, vocabulary: int) -> Shard:
    """Samples in the lengths of the arithmetic task: prompts of 24 tokens, answers of 8 to 24."""
    random = np.random.default_rng(0)
    answers = random.integers(8, 25, groups * size)
    lengths = [24 + int(answer) for answer in answers]
    mask = np.concatenate([np.repeat(np.array([0, 1], np.uint8), [24, answer]) for answer in answers])
    rows = [
        SampleRow(i, i // size, float(random.integers(2)), lengths[i], int(answers[i]), 0) for i in range(len(answers))
    ]
    columns = token_columns(
        random.integers(0, vocabulary, len(mask)), mask, logp_behavior=-random.random(len(mask)) * 5, policy_version=0
    )
    return Shard(
        step=0,
        rank=0,
        epoch=0,
        rows=rows,
        members=list(range(len(rows))),
        lengths=lengths,
        turn_starts=[[24]] * len(rows),
        columns=columns,
        loss_tokens=int(answers.sum()),
    )


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def loss_cost(loss: Loss, packs: list[LossInputs]) -> None:
    """Value and derivative with respect to the log-probabilities, over all packs."""
    for inputs in packs:
        torch.autograd.grad(loss(inputs).per_token.sum(), inputs.logp_current)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.bench losses")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    config = load_config(_RECIPE, [])
    trainer = Trainer(config, ensure_tiny_model(TinyRecipe(sft_steps=0)), last_step=10_000)
    vocabulary = trainer.policy.model.config.vocab_size
    shard = make_shard(config.rollout.groups_per_batch, config.rollout.group_size, vocabulary)
    minibatch = trainer.minibatches(shard)[0]
    temperature = config.sampling.temperature
    packs = [
        loss_inputs(pack, trainer.policy(pack.token_ids, pack.position_ids, select=pack.mask), needs_proximal=True)
        for pack in with_logp(trainer.policy, minibatch.packs, "logp_proximal", temperature=temperature)
    ]
    for inputs in packs:
        inputs.logp_current = inputs.logp_current.detach().requires_grad_()
    work: dict[str, Callable[[], object]] = {
        name: lambda loss=make_loss(name, {}): loss_cost(loss, packs) for name in loss_names()
    }
    work["proximal"] = lambda: with_logp(trainer.policy, minibatch.packs, "logp_proximal", temperature=temperature)
    shares: dict[str, list[float]] = {name: [] for name in work}
    for number in range(arguments.rounds + 1):  # the first warms up
        step = seconds(lambda number=number: trainer.update(minibatch, number))
        for name, run in work.items():
            if number:
                shares[name].append(seconds(run) / step)
            else:
                run()
    medians = {name: statistics.median(values) for name, values in shares.items()}
    print(f"{len(shard.rows)} samples, {sum(shard.lengths)} tokens in {len(packs)} packs; share of a learner step")
    for name in sorted(medians, key=medians.__getitem__):
        print(f"  {name:14} {medians[name]:.4f}")
    worst = max(value for name, value in medians.items() if name != "proximal")
    print(f"largest share of a loss {worst:.4f}; target {TARGET} {'met' if worst <= TARGET else 'missed'}")
    if arguments.out:
        result = {"share_of_step": medians, "largest": worst, "target": TARGET, "rounds": arguments.rounds}
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")

"""What each loss costs, as a share of a learner step on the CPU recipe.

    python -m experiments.bench losses [--rounds 9] [--out FILE.json]

A learner step is what the CPU recipe does with a batch: forward, loss, backward, clip and AdamW over its packs, one
rank, one thread, its model and lengths. The loss's share is its value and its own derivative on the same packs.
Loss and step alternate, and the median of the rounds' ratios is printed (target: at most 0.05 each). `proximal` is the
forward that a loss which needs recomputed log-probabilities adds where a batch has more than one minibatch (the recipe
has one: its step's own log-probabilities are those). `decoupled_ppo` with `proximal: interpolated` does without.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import torch

from algos.registry import Loss, make_loss, registered
from algos.types import LossInputs
from experiments.bench._measuring import Work, alternate, parser_of, random_batch_part, write
from experiments.bench._ratios import Idle, Ratio, provenance, ratio_of
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.config.schema import load_config
from rl.learner.trainer import Trainer
from rl.learner.update import loss_inputs, with_logp
from rl.models.packing import Pack
from rl.wire.messages import BatchPart

TARGET = 0.05
_RECIPE = Path(__file__).parent.parent / "math_cpu.yaml"


def loss_cost(loss: Loss, packs: list[LossInputs]) -> None:
    """Value and derivative with respect to the log-probabilities, over all packs."""
    for inputs in packs:
        torch.autograd.grad(loss(inputs).per_token.sum(), inputs.logp_current)


def main(argv: list[str]) -> None:
    parser = parser_of("losses", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)

    config = load_config(_RECIPE, [])
    trainer = Trainer(config, ensure_tiny_model(TinyRecipe(sft_steps=0)), last_step=10_000)
    vocabulary = trainer.policy.vocab_size
    batch_part = random_batch_part(config.rollout.groups_per_batch, config.rollout.group_size, 24, (8, 24), vocabulary)
    with Idle() as idle:
        shares = shares_of_step(trainer, batch_part, config.sampling.temperature, arguments.rounds)

    print(f"{len(batch_part.rows)} samples, {sum(batch_part.lengths)} tokens; share of a learner step")
    for name in sorted(shares, key=lambda name: shares[name].cpu.median):
        print(f"  {name:14} {shares[name]}")

    worst = max(set(shares) - {"proximal"}, key=lambda name: shares[name].cpu.median)
    verdict = shares[worst].verdict(at_most=TARGET, of="cpu", idle=idle)
    print(f"the dearest loss is {worst}: {verdict}")
    write(arguments.out, {"dearest": worst, "verdict": verdict} | provenance(idle, shares))


def shares_of_step(trainer: Trainer, batch_part: BatchPart, temperature: float, rounds: int) -> dict[str, Ratio]:
    """Each loss's seconds over those of the step beside it."""
    minibatch = trainer.minibatches(batch_part)[0]

    def proximal() -> list[Pack]:
        return with_logp(trainer.policy, minibatch.packs, "logp_proximal", temperature=temperature)

    packs = [loss_inputs(pack, trainer.policy(pack), needs_proximal=True) for pack in proximal()]
    for inputs in packs:
        inputs.logp_current = inputs.logp_current.detach().requires_grad_()

    steps = itertools.count()
    works: dict[str, Work] = {"step": lambda: trainer.update(minibatch, next(steps)), "proximal": proximal}
    works |= {name: partial(loss_cost, make_loss(name, {}), packs) for name in registered("loss")}
    measured = alternate(works, rounds, warm_up=1)

    step = measured.pop("step")
    return {name: ratio_of(values, step) for name, values in measured.items()}

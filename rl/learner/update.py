"""Gradients of one minibatch, of policy and critic: forward, loss and backward over its packs.

Every token's weighted loss is divided by the minibatch's *global* token count, so packs, ranks and micro-batches are
only a way to spread one sum. FSDP averages gradients over ranks; multiplying by the world size makes that a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from algos.types import LossInputs, LossResult
from rl.learner.algorithm import Algorithm
from rl.learner.diagnostics import Diagnostics
from rl.learner.routing import RoutingStats
from rl.models.packing import Pack
from rl.models.protocol import CriticModel, FrozenPolicy, PolicyModel, PolicyOutput
from rl.wire.columns import BUILT_IN

Observer = Callable[[Pack, LossInputs, LossResult], None]


@dataclass
class CriticStats:
    """Sums over tokens, (5,) float64: tokens, loss, return, return^2, (return - value before the batch)^2."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))

    def add(self, other: CriticStats) -> None:
        self.sums = self.sums + other.sums if len(self.sums) else other.sums

    def all_reduce(self) -> None:
        if len(self.sums) and dist.is_initialized():
            dist.all_reduce(self.sums)

    def metrics(self) -> dict[str, float]:
        """`critic/explained_variance`: 1 - the squared error of the values over the variance of the returns."""
        if not len(self.sums) or not self.sums[0]:
            return {}
        tokens, loss, total, square, error = self.sums.tolist()
        variance = square / tokens - (total / tokens) ** 2
        known = {} if variance <= 1e-12 else {"critic/explained_variance": 1 - error / tokens / variance}
        return {"critic/loss": loss / tokens, "critic/return": total / tokens} | known


def accumulate_critic(
    critic: CriticModel, packs: Iterable[Pack], *, global_tokens: int, world_size: int = 1, clip: float | None = None
) -> CriticStats:
    """Add this rank's part of the gradient of the mean over tokens of (V - return)^2 / 2 to `critic`.

    clip: the larger of that loss and the one of V held within `clip` of the value before the batch, as in PPO's
    reference implementation (https://arxiv.org/abs/2005.12729, section 3). Packs carry `values` and `returns`.
    """
    stats = CriticStats()
    for pack in packs:
        pack = pack.to(critic.device)
        assert pack.layout is not None
        assert pack.values is not None and pack.returns is not None, "packs need rl.learner.credit.assign first"

        values = critic(pack)
        loss = (values - pack.returns) ** 2 / 2  # (T,)
        if clip is not None:
            near = pack.values + (values - pack.values).clamp(-clip, clip)
            loss = torch.maximum(loss, (near - pack.returns) ** 2 / 2)
        loss = torch.where(pack.mask, loss, torch.zeros_like(loss))
        (loss.sum() * (world_size / max(1, global_tokens))).backward()

        generated = pack.layout.counted
        returns = pack.returns.index_select(0, generated).double()
        before = pack.values.index_select(0, generated).double()
        parts = [pack.mask.sum(), loss.sum(), returns.sum(), (returns**2).sum(), ((returns - before) ** 2).sum()]
        sums = torch.stack([part.detach().double() for part in parts])
        stats.add(CriticStats(torch.zeros_like(sums) if pack.layout.part[0] else sums))
    return stats


@dataclass
class UpdateStats:
    """The sums of one rank until `all_reduce`; then of all, identically."""

    diagnostics: Diagnostics = field(default_factory=Diagnostics)
    critic: CriticStats = field(default_factory=CriticStats)
    routing: RoutingStats = field(default_factory=RoutingStats)
    steps: dict[str, list[float]] = field(default_factory=dict)  # of each optimizer step, the same on every rank

    def add(self, other: UpdateStats) -> None:
        self.diagnostics.add(other.diagnostics)
        self.critic.add(other.critic)
        self.routing.add(other.routing.sums)
        for name, values in other.steps.items():
            self.steps[name] = self.steps.get(name, []) + values

    def all_reduce(self) -> None:
        self.diagnostics.all_reduce()
        self.critic.all_reduce()
        self.routing.all_reduce()

    def metrics(self) -> dict[str, float]:
        steps = {name: sum(values) / len(values) for name, values in self.steps.items()}
        return self.diagnostics.metrics() | self.critic.metrics() | self.routing.metrics() | steps

    def histograms(self) -> dict[str, list[float]]:
        return self.diagnostics.histograms()


def unobserved(pack: Pack, inputs: LossInputs, result: LossResult) -> None:
    """The observer of an update that nobody watches."""


def accumulate_gradients(
    policy: PolicyModel,
    packs: Iterable[Pack],
    algorithm: Algorithm,
    *,
    temperature: float,
    global_tokens: int,
    world_size: int = 1,
    first_step: bool = False,
    observe: Observer = unobserved,
) -> UpdateStats:
    """Add this rank's part of the minibatch's gradient to `policy`.

    first_step: whether the weights are still those before the batch's first optimizer step. Then the proximal policy is
    the current one and costs no forward of its own.
    global_tokens: loss tokens of the minibatch over all ranks. Under FSDP every rank needs equally many packs
    (`pad_packs`).
    observe: is called with each pack, without its gradient.
    """
    stats = UpdateStats()
    for pack in packs:
        pack = pack.to(policy.device)
        assert pack.layout is not None
        output = policy(pack, temperature=temperature, entropy_gradient=algorithm.entropy_gradient)

        inputs = loss_inputs(pack, output, needs_proximal=algorithm.needs_proximal, first_step=first_step)
        result, total = objective(algorithm, inputs, pack)
        (total * (world_size / max(1, global_tokens))).backward()
        stats.diagnostics.update(inputs, result, pack.layout.counted)
        stats.routing.add(output.routing)
        with torch.no_grad():
            observe(pack, inputs, result)
    return stats


def objective(algorithm: Algorithm, inputs: LossInputs, pack: Pack) -> tuple[LossResult, Tensor]:
    """What the loss says of a pack, and the sum that is to become smaller."""
    result = algorithm.regularisation(inputs, algorithm.correction(inputs, algorithm.loss))
    return result, (inputs.masked(result.per_token) * pack.token_weights).sum()


def with_logp(policy: FrozenPolicy, packs: Iterable[Pack], column: str, *, temperature: float) -> list[Pack]:
    """The packs with the log-probabilities of their tokens under the policy's present weights.

    column: `logp_proximal` (the trust region's anchor: before the first step), `logp_reference`, or a registered
    column of the learner (`rl.wire.columns`).
    """
    return _with_column(packs, column, lambda pack: policy(pack.to(policy.device), temperature=temperature).logp)


def with_values(critic: CriticModel, packs: Iterable[Pack]) -> list[Pack]:
    """The packs with the present values of their generated tokens; all ranks call it with equally many packs."""
    return _with_column(packs, "values", lambda pack: critic(pack.to(critic.device)))


@torch.no_grad()
def _with_column(packs: Iterable[Pack], column: str, forward: Callable[[Pack], Tensor]) -> list[Pack]:
    """It does not run under inference_mode: parameters gathered there could not be trained afterwards."""
    packs = list(packs)
    found = [forward(pack) for pack in packs]
    # Only now, because each copy waits for a GPU.
    both = zip(packs, found, strict=True)
    return [pack.with_columns(**{column: values.to(pack.token_ids.device)}) for pack, values in both]


def loss_inputs(pack: Pack, output: PolicyOutput, *, needs_proximal: bool, first_step: bool = False) -> LossInputs:
    """first_step: `output` is of the proximal policy itself.

    Raises ValueError when `logp_proximal` is needed and the pack (a dummy added too late?) has none.
    """
    proximal = output.logp.detach() if first_step else pack.logp_proximal
    if needs_proximal and proximal is None:
        raise ValueError("this algorithm needs logp_proximal: call with_logp on the padded packs first")

    def clean(values: Tensor) -> Tensor:
        """Zero at masked positions, where nan is legal."""
        mask = pack.mask.view(-1, *[1] * (values.dim() - 1))
        return torch.where(mask, values, torch.zeros_like(values))

    return LossInputs(
        logp_current=clean(output.logp),
        logp_behavior=clean(pack.logp_behavior),
        logp_proximal=clean(proximal) if needs_proximal and proximal is not None else None,
        entropy=clean(output.entropy),
        advantages=clean(pack.advantages),
        mask=pack.mask,
        sample=pack.sample,
        n_samples=len(pack.rewards),
        staleness=pack.staleness,
        rewards=pack.rewards,
        logp_reference=None if pack.logp_reference is None else clean(pack.logp_reference),
        columns={name: clean(values) for name, values in pack.columns.items() if name not in BUILT_IN},
    )

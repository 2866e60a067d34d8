"""What every loss must hold, as checks that run in seconds: `fresco check-loss NAME`, and the project's own tests.

Checks are about the contract with the learner, not about a paper: whether the value is the formula's is for a test
of one's own, like `tests/algos/test_losses.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from algos.registry import Loss
from algos.types import LossInputs, LossResult

RATIOS = torch.logspace(-6, 6, 25, dtype=torch.float64)
ADVANTAGES = torch.tensor([-2.0, -0.5, 0.0, 0.5, 2.0], dtype=torch.float64)
PROXIMAL_OFFSET = 0.05  # logp_proximal - logp_behavior
_NOT_PER_TOKEN = "shape {}, not one value per token"
_LOGPROBS = ("logp_current", "logp_behavior", "logp_proximal")


@dataclass(frozen=True)
class Finding:
    """What one check found out about a loss."""

    check: str
    problem: str  # empty: it holds


def check_loss(loss: Loss) -> list[Finding]:
    """One finding per check of `CHECKS`; a result that no check could read is the only one."""
    useless = _useless(loss, loss(random_inputs()))
    return [Finding("result", useless)] if useless else [Finding(name, run(loss)) for name, run in CHECKS.items()]


def untrainable(loss: Loss, columns: Mapping[str, tuple[int, ...]]) -> str:
    """Why a step with this loss would fail; empty: it would not. columns: as in `missing_inputs`."""
    result = loss(_with_columns(random_inputs(), columns))
    return _useless(loss, result) or _of_another_shape(result)


def _useless(loss: Loss, result: object) -> str:
    """Why there is nothing to train with in what it returned for `random_inputs`."""
    if not isinstance(result, LossResult):
        return f"it returns a {type(result).__name__}, not a LossResult"
    shape = getattr(result.per_token, "shape", ())
    if shape != random_inputs().mask.shape:
        return f"per_token has {_NOT_PER_TOKEN.format(tuple(shape))}"
    found = result.per_token.requires_grad or loss.spec.entropy_gradient
    return "" if found else "its values do not depend on logp_current: there is no gradient"


def _of_another_shape(result: LossResult) -> str:
    """The first metric that has not one value per token."""
    for name, values in result.metrics.items():
        shape = getattr(values, "shape", ())
        if shape != result.per_token.shape:
            return f"metric {name!r} has {_NOT_PER_TOKEN.format(tuple(shape))}"
    return ""


class AnyColumn(dict[str, Tensor]):
    """Zeros, (T,), for whatever further column a loss reads: no check depends on what a plug-in's column holds.

    The teacher of a distillation wants what the advantages want, so what must hold of them must hold of it.
    """

    def __init__(self, current: Tensor, advantages: Tensor) -> None:
        super().__init__(teacher_logp=current.detach() + advantages)

    def __missing__(self, name: str) -> Tensor:
        return torch.zeros(len(self["teacher_logp"]))


def missing_inputs(
    loss: Loss, *, proximal: bool, reference: bool, columns: Mapping[str, tuple[int, ...]] | None = None
) -> str:
    """What the loss reads, of log-probabilities and further columns, and nothing computes; empty: nothing is missing.

    columns: shape of one entry of each column that there is; None: any is.
    """
    inputs = _with_columns(random_inputs(), columns)
    try:
        loss(inputs)
    except KeyError as error:
        return str(error.args[0])

    for name, computed in {"logp_proximal": proximal, "logp_reference": reference}.items():
        try:
            if not computed:
                loss(_with(inputs, [name], lambda _: None))
        except (TypeError, AttributeError, AssertionError):  # arithmetic with None, or the loss's own check
            return name
    return ""


def _with_columns(inputs: LossInputs, columns: Mapping[str, tuple[int, ...]] | None) -> LossInputs:
    """With a reference, and zeros for these columns."""
    inputs = replace(inputs, logp_reference=inputs.logp_behavior)
    if columns is None:
        return inputs
    return replace(inputs, columns={name: torch.zeros(len(inputs.mask), *shape) for name, shape in columns.items()})


def declared(loss: Loss) -> str:
    """It asks for the log-probabilities that it uses."""
    missing = missing_inputs(loss, proximal=loss.needs_proximal, reference=True)
    return f"{missing} is used, but not asked for: register the loss with needs_proximal=True" if missing else ""


def finite(loss: Loss) -> str:
    """Values and gradients are finite for ratios from 1e-6 to 1e6, in float32 and float64."""
    for dtype in (torch.float32, torch.float64):
        inputs = cast(grid(), dtype)
        result = loss(inputs)
        bad = ~(result.per_token.isfinite() & gradient(result.per_token, inputs).isfinite())
        if bad.any():
            at = int(bad.nonzero()[0])
            ratio = float((inputs.logp_current.detach() - inputs.logp_behavior)[at].exp())
            advantage = float(inputs.advantages[at])
            return f"{dtype}: value or gradient is not finite at ratio {ratio:.1e}, advantage {advantage:g}"
    return ""


def masked_tokens(loss: Loss) -> str:
    """Masked tokens contribute exactly nothing, whatever stands there."""
    inputs = random_inputs()
    clean = loss(inputs).per_token
    slope = gradient(clean, inputs)
    if clean[~inputs.mask].any():
        return "per_token is not 0 on masked tokens: wrap it in inputs.masked(...)"

    for poison in (float("nan"), float("inf"), -float("inf")):
        hide = partial(torch.masked_fill, mask=~inputs.mask, value=poison)
        dirty = _with(inputs, [*_LOGPROBS, "entropy"], hide)
        found = loss(dirty).per_token
        if not torch.equal(found, clean) or not torch.equal(gradient(found, dirty), slope):
            return f"{poison} on a masked token changes value or gradient: use inputs.log_ratio and inputs.masked"
    return ""


def cuts(loss: Loss) -> str:
    """How samples are cut into packs changes neither value nor gradient."""
    inputs = random_inputs()
    whole = loss(inputs)
    slope = gradient(whole.per_token, inputs)
    groups = [[0, 3], [1], [2, 4, 5]]
    parts = [loss(part(inputs, samples)) for samples in groups]
    for samples, result in zip(groups, parts, strict=True):
        expected = whole.per_token[torch.isin(inputs.sample, torch.tensor(samples))]
        if not _equal(result.per_token, expected):
            return "a sample's loss depends on which other samples are in its pack"
        if result.metrics.keys() != whole.metrics.keys():
            return f"metrics {sorted(result.metrics)} of one pack, {sorted(whole.metrics)} of another"

    total = sum((result.per_token.sum() for result in parts), torch.zeros((), dtype=torch.float64))
    (found,) = torch.autograd.grad(total, inputs.logp_current)
    return "" if _equal(found, slope) else "the gradient depends on how samples are cut into packs"


def direction(loss: Loss) -> str:
    """On policy, a step raises tokens of positive and lowers tokens of negative advantage."""
    inputs = on_policy(random_inputs())
    slope = gradient(loss(inputs).per_token, inputs)
    wrong = inputs.mask & (slope * inputs.advantages >= 0)
    return "on policy, descent does not raise good tokens and lower bad ones" if wrong.any() else ""


def nothing_generated(loss: Loss) -> str:
    """A pack without generated tokens has no loss and no gradient."""
    inputs = random_inputs()
    inputs = replace(inputs, mask=torch.zeros_like(inputs.mask))
    per_token = loss(inputs).per_token
    return "a pack of masked tokens has a loss" if per_token.any() or gradient(per_token, inputs).any() else ""


def no_signal(loss: Loss) -> str:
    """Constant groups (advantage 0) give finite values, and no gradient on policy."""
    inputs = random_inputs()
    zeros = torch.zeros_like(inputs.advantages)
    inputs = replace(inputs, advantages=zeros, columns=AnyColumn(inputs.logp_current, zeros))
    if not loss(inputs).per_token.isfinite().all():
        return "advantage 0 gives values that are not finite"
    still = on_policy(inputs)
    return "advantage 0 has a gradient on policy" if gradient(loss(still).per_token, still).abs().max() > 1e-9 else ""


def metrics(loss: Loss) -> str:
    """Metrics are (T,) tensors without a gradient."""
    result = loss(random_inputs())
    carries = next((name for name, values in result.metrics.items() if getattr(values, "requires_grad", False)), None)
    return _of_another_shape(result) or (f"metric {carries!r} carries a gradient: detach it" if carries else "")


CHECKS: dict[str, Callable[[Loss], str]] = {
    check.__name__: check
    for check in (declared, finite, masked_tokens, cuts, direction, nothing_generated, no_signal, metrics)
}


# ------------------------------------------------------------ inputs, in float64


def grid() -> LossInputs:
    """Every ratio with every advantage, each sample one advantage, all tokens generated."""
    n = len(ADVANTAGES)
    per_sample = len(RATIOS)
    behavior = torch.linspace(-4, -1, n * per_sample, dtype=torch.float64)
    return inputs_of(
        (behavior + RATIOS.log().repeat(n)).requires_grad_(),
        behavior,
        ADVANTAGES.repeat_interleave(per_sample),
        torch.arange(n).repeat_interleave(per_sample),
    )


def random_inputs(tokens_per_sample: int = 9, samples: int = 6, seed: int = 0) -> LossInputs:
    """Samples near the policy, with prompts and observations masked."""
    generator = torch.Generator().manual_seed(seed)
    shape = (samples * tokens_per_sample,)
    behavior = -3 * torch.rand(shape, generator=generator, dtype=torch.float64) - 0.1
    current = behavior + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    per_sample = torch.randn(samples, generator=generator, dtype=torch.float64)

    inputs = inputs_of(
        current.requires_grad_(),
        behavior,
        per_sample.repeat_interleave(tokens_per_sample),
        torch.arange(samples).repeat_interleave(tokens_per_sample),
    )

    mask = torch.rand(shape, generator=generator) < 0.7
    staleness = torch.randint(0, 3, shape, generator=generator) * mask
    return replace(inputs, mask=mask, staleness=staleness)


def inputs_of(current: Tensor, behavior: Tensor, advantages: Tensor, sample: Tensor) -> LossInputs:
    """A pack of generated tokens; all arguments (T,), each sample of one advantage, which is its reward too."""
    n_samples = int(sample.max()) + 1

    return LossInputs(
        logp_current=current,
        logp_behavior=behavior,
        logp_proximal=behavior + PROXIMAL_OFFSET,
        entropy=torch.ones_like(behavior),
        advantages=advantages,
        mask=torch.ones(len(current), dtype=torch.bool),
        sample=sample,
        n_samples=n_samples,
        staleness=torch.zeros(len(current), dtype=torch.int64),
        columns=AnyColumn(current, advantages),
        rewards=torch.stack([advantages[sample == i][0] for i in range(n_samples)]),
    )


def on_policy(inputs: LossInputs) -> LossInputs:
    """The inputs as if the current policy had sampled the tokens."""
    current = inputs.logp_current.detach()
    return replace(inputs, logp_behavior=current, logp_proximal=current)


def cast(inputs: LossInputs, dtype: torch.dtype) -> LossInputs:
    """The inputs with all numbers in another precision, and a `logp_current` of its own."""
    made = _with(inputs, [*_LOGPROBS, "entropy", "advantages", "rewards"], lambda values: values.to(dtype))
    return replace(made, columns=AnyColumn(made.logp_current, made.advantages))


def part(inputs: LossInputs, samples: list[int]) -> LossInputs:
    """The given samples only, as a pack of their own; `logp_current` stays on the graph."""
    chosen = torch.isin(inputs.sample, torch.tensor(samples))
    per_token = (*_LOGPROBS, "entropy", "advantages", "mask", "sample", "staleness")
    kept = replace(inputs, **{name: getattr(inputs, name)[chosen] for name in per_token})
    index = torch.searchsorted(torch.tensor(samples), kept.sample)
    columns = AnyColumn(kept.logp_current, kept.advantages)
    return replace(kept, sample=index, n_samples=len(samples), rewards=inputs.rewards[samples], columns=columns)


def _with(inputs: LossInputs, names: Iterable[str], change: Callable[[Tensor], Tensor | None]) -> LossInputs:
    """The inputs with these tensors changed; `logp_current` is a leaf again."""
    fields: dict[str, Any] = {name: change(getattr(inputs, name)) for name in names}
    changed = replace(inputs, **fields)
    return replace(changed, logp_current=changed.logp_current.detach().requires_grad_())


def _equal(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def gradient(per_token: Tensor, inputs: LossInputs) -> Tensor:
    """(T,) of the sum; 0 where the loss does not depend on `logp_current`."""
    if not per_token.requires_grad:
        return torch.zeros_like(inputs.logp_current)
    (found,) = torch.autograd.grad(per_token.sum(), inputs.logp_current, allow_unused=True, retain_graph=True)
    return torch.zeros_like(inputs.logp_current) if found is None else found

"""M2PO: tokens whose ratios went furthest are left out until the second moment of the rest is small."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from algos.registry import register_loss
from algos.types import LossInputs, LossResult, Positive


@dataclass(frozen=True)
class M2POOptions:
    threshold: Positive = 0.04
    """Bound of the mean squared log-ratio."""


@register_loss("m2po", M2POOptions)
def m2po(inputs: LossInputs, options: M2POOptions) -> LossResult:
    """-M r A with r = pi_current / pi_behavior; M leaves out tokens until mean((log r)^2) <= threshold.

    Zheng et al. 2025, eq. 6 and algorithm 1 (https://arxiv.org/abs/2510.01161). As there, only tokens that the trust
    region pulls on can be left out (A > 0 with r > 1, A < 0 with r < 1), the furthest first. The paper takes the mean
    over a batch; here it is over each sample, so that no split of a batch changes the loss.
    """
    log_ratio = inputs.log_ratio(inputs.logp_current, inputs.logp_behavior)  # (T,)
    keep = _kept(inputs, log_ratio.detach(), options.threshold)
    loss = -torch.where(keep, log_ratio, 0).exp() * inputs.advantages * keep
    return LossResult(inputs.masked(loss), {"mask_fraction": (~keep).float()})


def _kept(inputs: LossInputs, log_ratio: Tensor, threshold: float) -> Tensor:
    """(T,) bool: as many of each sample's pulled tokens, nearest first, as its second moment allows.

    The moment is the mean over what is kept. Leaving out the k furthest is enough at the first k whose rest is within
    the bound; tokens that are not pulled always stay.
    """
    pulled = inputs.mask & (torch.sign(inputs.advantages) * log_ratio > 0)
    square = log_ratio.double() ** 2
    stays = inputs.mask & ~pulled
    base = inputs.sample_sum(torch.where(stays, square, 0))  # (n_samples,)
    count = inputs.sample_sum(stays.double())  # (n_samples,)

    order = torch.argsort(torch.where(pulled, square, 0), stable=True)
    order = order[torch.argsort(inputs.sample[order], stable=True)]  # by sample, nearest first
    sample = inputs.sample[order]
    taken = pulled[order].double()
    sums = torch.where(pulled, square, 0)[order].cumsum(0)
    counts = taken.cumsum(0)

    first = torch.searchsorted(sample, torch.arange(inputs.n_samples, device=sample.device))
    before_sums = torch.cat((sums.new_zeros(1), sums))[first]
    before_counts = torch.cat((counts.new_zeros(1), counts))[first]
    moment = (base[sample] + sums - before_sums[sample]) / (count[sample] + counts - before_counts[sample]).clamp(min=1)
    within = torch.where(pulled[order], moment <= threshold, True)

    # Nearest first: once a token is too far, so are all after it unless the moment falls again, and then all fit.
    last = torch.zeros_like(base).scatter_reduce(0, sample, counts * within * taken, "amax")
    fits = torch.empty_like(within)
    fits[order] = counts <= last[sample]
    return ~pulled | fits

"""Every token of a batch against the very weights that sampled it (`alarms.exact`).

The guards compare tokens of the present weights only; with `rollout.alpha` of 1 most tokens are older. Here the weights
of the versions that a batch may hold are kept, put back one after another, and each token's log-probability is computed
anew by its own. It costs as many copies and forwards as there are versions: for tests, and for runs that prove a path.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl.config.schema import Config
from rl.learner.credit import Minibatch, all_reduce
from rl.models.packing import Pack
from rl.models.protocol import PolicyModel
from rl.observe.alarms import Alarms


class ExactCheck:
    """The check of one rank; all ranks call `batch` together."""

    def __init__(self, policy: PolicyModel, config: Config, alarms: Alarms) -> None:
        self._policy = policy
        self._alarms = alarms
        self._limit = config.alarms.exact
        self._temperature = config.sampling.temperature
        self._versions = config.rollout.staleness_bound + 1
        self._kept: dict[int, list[Tensor]] = {}  # version -> this rank's rows of every tensor

    @torch.no_grad()
    def batch(self, step: int, minibatches: list[Minibatch]) -> dict[str, float]:
        """To be called before the first optimizer step of a batch, when the weights are those of version `step`.

        Metrics over all ranks: `exact/max` (nats, largest difference of a token), `exact/tokens` (compared),
        `exact/unknown` (sampled by a version from before this process began), `exact/versions`. Raises RunAlarm beyond
        the limit; nothing is done without one.
        """
        if self._limit is None:
            return {}
        self._kept[step] = [rows.clone() for rows in self._rows()]
        self._kept.pop(step - self._versions, None)

        gaps = torch.zeros(self._versions, dtype=torch.float64)
        counts = torch.zeros(self._versions, dtype=torch.float64)
        for age in range(self._versions):
            if all_reduce(counts.new_tensor(self._tokens(age, minibatches)), "sum") and step - age in self._kept:
                self._put(self._kept[step - age])
                gaps[age], counts[age] = self._compare(age, minibatches)
        self._put(self._kept[step])

        gap = float(all_reduce(gaps, "max").max())
        counts = all_reduce(counts, "sum")
        trained = sum(minibatch.loss_tokens for minibatch in minibatches)
        compared = int(counts.sum())
        wrong = not gap <= self._limit  # nan is wrong as well
        self._alarms.check("not-exact", wrong, f"{gap:.3g} nats at step {step}, limit {self._limit:g}")
        return {
            "exact/max": gap,
            "exact/tokens": float(compared),
            "exact/unknown": float(trained - compared),
            "exact/versions": float((counts > 0).sum()),
        }

    def _compare(self, age: int, minibatches: list[Minibatch]) -> tuple[float, int]:
        """Largest difference of this rank's tokens that are `age` versions old, under the weights put in; their count.

        Every pack runs, also one without such tokens: under FSDP the ranks' forwards belong together.
        """
        gaps = [torch.zeros(1)]
        for pack in (_of_age(pack, age) for minibatch in minibatches for pack in minibatch.packs):
            logp = self._policy(pack.to(self._policy.device), temperature=self._temperature).logp
            gaps.append((logp.to(pack.token_ids.device) - pack.logp_behavior)[pack.mask].abs())
        found = torch.cat(gaps)
        return float(found.nan_to_num(math.inf, math.inf).max()), len(found) - 1

    def _tokens(self, age: int, minibatches: list[Minibatch]) -> int:
        packs = (pack for minibatch in minibatches for pack in minibatch.packs)
        return sum(_of_age(pack, age).loss_tokens for pack in packs)

    def _rows(self) -> list[Tensor]:
        return [tensor for _, tensor, _ in self._policy.export(untie=False)]

    def _put(self, kept: list[Tensor]) -> None:
        for rows, values in zip(self._rows(), kept, strict=True):
            rows.copy_(values)


def _of_age(pack: Pack, age: int) -> Pack:
    """The pack, of whose tokens only those count that are `age` versions old."""
    return pack.with_columns(loss_mask=pack.mask & (pack.staleness == age))

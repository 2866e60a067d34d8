"""What the learner knows of the tokens of those samples whose conversations are kept, for people to read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from algos.types import LossInputs, LossResult
from rl.models.packing import Pack
from rl.store.samples import FOLDER, TRAINED, LineFile, Trained, is_kept
from rl.wire.messages import BatchPart, SampleRow


class TokenLog(LineFile):
    """Observes the update of one rank: `batch(batch_part)`, then each of its packs."""

    def __init__(self, run: Path, name: str, rate: float) -> None:
        super().__init__(run / FOLDER / TRAINED / f"{name}.jsonl")
        self._rate = rate
        self._step = -1
        self._rows: list[SampleRow] = []

    def batch(self, batch_part: BatchPart) -> None:
        self._step = batch_part.step
        self._rows = batch_part.rows

    def __call__(self, pack: Pack, inputs: LossInputs, result: LossResult) -> None:
        places = [
            place for place, member in enumerate(pack.members) if is_kept(self._rows[member].group_id, self._rate)
        ]
        if not places:
            return

        mask = inputs.mask
        bounds = [values[mask] != 0 for name, values in result.metrics.items() if name.endswith("_fraction")]
        clipped = torch.stack(bounds).any(0) if bounds else torch.zeros_like(mask[mask])
        tokens = torch.stack([inputs.advantages, inputs.logp_current - inputs.logp_behavior, inputs.entropy])
        table = torch.cat([tokens[:, mask].double(), clipped.double()[None]]).cpu()  # (4, L) of all samples in turn

        own = torch.bincount(inputs.sample[mask], minlength=len(pack.members)).tolist()
        parts = table.split(own, dim=1)
        for place in places:
            self.write(self._trained(self._rows[pack.members[place]].ticket_id, parts[place]))

    def _trained(self, ticket_id: int, table: Tensor) -> Trained:
        """table: (4, L) advantage, log ratio, entropy, and whether a bound took effect."""
        *values, bound = table.tolist()
        advantage, log_ratio, entropy = ([round(value, 4) for value in each] for each in values)
        clipped = [place for place, taken in enumerate(bound) if taken]
        return Trained(ticket_id, self._step, advantage, log_ratio, entropy, clipped)

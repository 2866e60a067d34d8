"""What the learner knows of the tokens of those samples whose conversations are kept, for people to read."""

from __future__ import annotations

from pathlib import Path

import torch

from algos.types import LossInputs, LossResult
from rl.core.messages import SampleRow, Shard
from rl.core.samples import FOLDER, TRAINED, LineFile, Trained, is_kept
from rl.learner.packing import Pack


class KeptTokens(LineFile):
    """Observes the update of one rank: `batch(shard)`, then each of its packs."""

    def __init__(self, run: Path, name: str, rate: float) -> None:
        super().__init__(run / FOLDER / TRAINED / f"{name}.jsonl")
        self._rate = rate
        self._step = -1
        self._rows: list[SampleRow] = []

    def batch(self, shard: Shard) -> None:
        self._step = shard.step
        self._rows = shard.rows

    def __call__(self, pack: Pack, inputs: LossInputs, result: LossResult) -> None:
        for place, member in enumerate(pack.members):
            if is_kept(self._rows[member].group_id, self._rate):
                self.write(self._trained(self._rows[member].ticket_id, place, inputs, result))

    def _trained(self, ticket_id: int, place: int, inputs: LossInputs, result: LossResult) -> Trained:
        own = inputs.mask & (inputs.sample == place)
        bounds = [values[own] for name, values in result.metrics.items() if name.endswith("_fraction")]
        clipped = torch.stack(bounds).amax(0).nonzero()[:, 0].tolist() if bounds else []

        tokens = torch.stack([inputs.advantages, inputs.logp_current - inputs.logp_behavior, inputs.entropy])
        advantage, log_ratio, entropy = (
            [round(value, 4) for value in values] for values in tokens[:, own].double().tolist()
        )
        return Trained(ticket_id, self._step, advantage, log_ratio, entropy, clipped)

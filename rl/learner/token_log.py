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
    """Observes the update of one rank: `batch(batch_part)`, then each of its packs, then `write_batch`.

    What a pack shows stays on the device until then: to read it within an update, the host would wait for a GPU.
    """

    def __init__(self, run: Path, name: str, rate: float) -> None:
        super().__init__(run / FOLDER / TRAINED / f"{name}.jsonl")
        self._rate = rate
        self._step = -1
        self._rows: list[SampleRow] = []
        self._seen: list[tuple[tuple[int, ...], Tensor]] = []

    def batch(self, batch_part: BatchPart) -> None:
        self._step = batch_part.step
        self._rows = batch_part.rows

    def __call__(self, pack: Pack, inputs: LossInputs, result: LossResult) -> None:
        if not any(self._is_kept(member) for member in pack.members):
            return
        assert pack.layout is not None
        generated = pack.layout.generated

        def taken(values: Tensor) -> Tensor:
            return values.index_select(0, generated).double()

        bounds = [taken(values) for name, values in result.metrics.items() if name.endswith("_fraction")]
        ratio = inputs.logp_current - inputs.logp_behavior
        advantage, *others = (taken(each) for each in (inputs.advantages, ratio, inputs.entropy, inputs.sample))
        clipped = torch.stack(bounds).ne(0).any(0).double() if bounds else torch.zeros_like(advantage)
        self._seen.append((pack.members, torch.stack([advantage, *others, clipped])))

    def write_batch(self) -> None:
        """All that was seen since the last time."""
        for members, on_device in self._seen:
            table = on_device.cpu()  # (5, L) of all samples in turn
            own = torch.bincount(table[3].long(), minlength=len(members)).tolist()
            parts = table[[0, 1, 2, 4]].split(own, dim=1)
            for member, part in zip(members, parts, strict=True):
                if self._is_kept(member):
                    self.write(self._trained(self._rows[member].ticket_id, part))
        self._seen = []

    def _is_kept(self, member: int) -> bool:
        return is_kept(self._rows[member].group_id, self._rate)

    def _trained(self, ticket_id: int, table: Tensor) -> Trained:
        """table: (4, L) advantage, log ratio, entropy, and whether a bound took effect."""
        *values, bound = table.tolist()
        advantage, log_ratio, entropy = ([round(value, 4) for value in each] for each in values)
        clipped = [place for place, taken in enumerate(bound) if taken]
        return Trained(ticket_id, self._step, advantage, log_ratio, entropy, clipped)

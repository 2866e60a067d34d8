"""Channel `nccl`, here over gloo, from two ranks of a learner into a real engine of two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl.weights import make_sender
from rl.weights.channel import Entry
from tests.rl.weights.offering import offer_rows
from tests.rollout.generator.test_families_engine import VERSIONS, FamilyRig, agree_over_updates

SETTINGS = ("weights.transport=nccl", "learner.ranks=2", "generator.tensor_parallel=2")


class SentRig(FamilyRig):
    """Its versions come from senders in this process, in the place of files."""

    def __init__(self, folder: Path) -> None:
        super().__init__("llama", folder, own_process=True, settings=SETTINGS)
        self.receipts: list[int | None] = []
        self.rows = [load_file(self.folder / f"written.{n}") for n in range(VERSIONS)]
        entries: list[Entry] = [(name, tuple(each.shape), "float32") for name, each in self.rows[0].items()]
        self.senders = [make_sender(self.run, rank, entries) for rank in range(2)]
        for sender in self.senders:
            sender.open()

    def publish(self, n: int, without: str = "") -> None:
        self.receipts.append(offer_rows(self.senders, n, self.rows[n]))

    def stop(self) -> None:
        for sender in reversed(self.senders):
            sender.close()
        super().stop()


@pytest.mark.docs
@pytest.mark.slow
def test_both_ranks_get_what_both_ranks_send(tmp_path: Path) -> None:
    rig = SentRig(tmp_path)
    agree_over_updates(rig)
    assert len(set(rig.receipts)) == VERSIONS and None not in rig.receipts

"""What ranks of the learner offer in tests of channels."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rl.weights.channel import Piece, Placement, Sender
from rl.wire.messages import Version


def offer_rows(senders: list[Sender], n: int, tensors: Mapping[str, Tensor], timeline: int = 0) -> int | None:
    """Each rank offers its rows, as FSDP splits them; a scalar is rank 0's. It is announced; returns the receipt."""
    for rank, sender in enumerate(senders):
        pieces: list[Piece] = []
        for name, whole in tensors.items():
            rows = -(-len(whole) // len(senders)) if whole.shape else 0
            part = whole[rank * rows : (rank + 1) * rows] if whole.shape else whole if rank == 0 else torch.empty(0)
            pieces.append((name, part, Placement(tuple(whole.shape), rank * rows)))
        sender.offer(n, pieces)

    receipt = senders[0].receipt(n)
    senders[0].announce(Version(timeline, n))
    return receipt

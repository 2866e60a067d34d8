"""Ranks that compute a pack together, so that each holds a share of its activations (`learner.context_parallel`).

Of the C tokens of a forward, rank i of a team of n has those at i, i + n, i + 2n and so on. So all have as many tokens,
and about as many targets. Only attention sees more than one token. There ranks exchange, as in DeepSpeed's Ulysses
(https://arxiv.org/abs/2309.14509): each gets all tokens of its share of the heads, and gives back what it found. Where
there are fewer key-value heads than ranks, each rank that needs one gets a copy.

Each rank ends with the log-probabilities of the whole pack and computes the whole loss. Its backward begins at its own
targets alone, so the gradients of a team add up to that of the pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import pad

from rl.config.schema import Config
from rl.models.compiled import left_alone

_COLLECTIVES: Any = _functional_collectives  # untyped


@dataclass(frozen=True)
class Team:
    index: int
    """Of this rank in its team."""
    size: int
    group: dist.ProcessGroup
    counted: dist.ProcessGroup
    """The ranks with this index in all teams: together they have each sample of a batch once."""

    @property
    def part(self) -> tuple[int, int]:
        """What this rank computes of a layout (`rl.models.layout`)."""
        return self.index, self.size

    @left_alone
    def to_heads(self, q: Tensor, k: Tensor, v: Tensor, tokens: int) -> list[Tensor]:
        """(n, heads, d) of this rank's tokens; (tokens, heads / size, d) of all ranks' tokens."""
        parts = [self._parted(each) for each in (q, k, v)]
        widths = [each.shape[2] for each in parts]
        held = self._exchanged(torch.cat(parts, 2).transpose(0, 1))  # (size, n, heads, d): from each rank its tokens
        return [each.transpose(0, 1).flatten(0, 1)[:tokens] for each in held.split(widths, 2)]

    @left_alone
    def to_tokens(self, found: Tensor) -> Tensor:
        """(tokens, heads / size, d) of all ranks' tokens; (n, heads, d) of this rank's."""
        fill = -len(found) % self.size
        filled = pad(found, (0, 0, 0, 0, 0, fill)).unflatten(0, (-1, self.size))  # (n, size, heads / size, d)
        return self._exchanged(filled.transpose(0, 1)).transpose(0, 1).flatten(1, 2)

    def joined(self, values: Tensor) -> Tensor:
        """What all ranks of the team have set in `values`, zero elsewhere. The gradient is of this rank's own."""
        own = values.detach()
        whole = own.clone()
        dist.all_reduce(whole, group=self.group)
        return values + (whole - own)

    def _parted(self, each: Tensor) -> Tensor:
        """(n, size, heads of each rank, d)"""
        heads = each.shape[1]
        if heads < self.size:
            each = each.repeat_interleave(self.size // heads, 1)
        parted: Tensor = each.unflatten(1, (self.size, -1))
        return parted

    def _exchanged(self, sent: Tensor) -> Tensor:
        """(size, ...): rank r gets place r of everybody, ordered by whom it is from."""
        got = _COLLECTIVES.all_to_all_single_autograd(sent.contiguous(), None, None, self.group)
        whole: Tensor = _COLLECTIVES.wait_tensor(got)
        return whole


def make_mesh(config: Config, device: str, ranks: int) -> DeviceMesh | None:
    """Over which a model is sharded; of several copies each among neighbours.

    None where there is nothing to shard.
    """
    if ranks == 1:
        return None
    copies = config.learner.copies
    if copies == 1 or ranks % copies:
        return init_device_mesh(device, (ranks,))
    return init_device_mesh(device, (copies, ranks // copies), mesh_dim_names=("copies", "shards"))


def make_team(device: str, size: int) -> Team | None:
    """That of this rank, with its neighbours; None where each computes by itself. All ranks call it together."""
    if size == 1:
        return None
    mesh = init_device_mesh(device, (dist.get_world_size() // size, size), mesh_dim_names=("counted", "team"))
    return Team(mesh.get_local_rank("team"), size, mesh.get_group("team"), mesh.get_group("counted"))

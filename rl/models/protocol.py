"""The seam "model": all that trainer, checks, publication and benches know of a model.

    policy = Policy.load(folder, mesh, device)
    logp, entropy = policy(pack, temperature=0.7)
    for name, tensor, placement in policy.export(): ...

A forward takes the whole pack. What a family reads beside token ids (routed experts, images, an adapter's number) are
columns of it, and no caller gets a new argument. Everything about architectures stands below this file: attention,
head, sharding, names of tensors, refusals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from rl.config.lora import LoraOptions
from rl.config.schema import LearnerConfig
from rl.models.packed_attention import Kernel
from rl.models.packing import Pack
from rl.models.routers import Routing
from rl.models.team import Team
from rl.weights.channel import Placement as Placement


@dataclass(frozen=True)
class ModelOptions:
    """How a model computes; the same weights give the same numbers with any of them, up to rounding."""

    dtype: torch.dtype = torch.float32  # of forward and backward; weights and gradients are float32
    reduce_dtype: torch.dtype = torch.float32  # in which ranks add up their gradients
    activation_checkpointing: bool = False
    logprob_chunk: int | None = LearnerConfig().logprob_chunk
    attention: Kernel = LearnerConfig().attention
    compile: bool = False  # its layers, and the head's passes over logits
    lora: LoraOptions | None = None  # then adapters are trained; all else stands still, in `dtype`
    router_replay: bool = False  # whether its routers choose the experts that a pack names
    team: Team | None = None  # ranks that compute each pack together


class PolicyOutput(NamedTuple):
    """A tuple, because FSDP finds the tensors whose backward it must prepare for in tuples, not in dataclasses."""

    logp: Tensor  # (T,) float32
    entropy: Tensor  # (T,) float32
    routing: Routing | None = None  # of a mixture of experts


class Exported(NamedTuple):
    """What this rank holds of one tensor of a checkpoint, by the name that the model's own files give it."""

    name: str
    tensor: Tensor  # (n, ...), a view of the weights, or float32 computed from them; n may be 0
    placement: Placement


class Model(Protocol):
    """A model with its weights, of one rank. All ranks call the same methods in the same order."""

    families: Iterable[str]
    """Kinds of models (`model_type` in their `config.json`) that `load` accepts."""
    reads: Collection[str]
    """Names of the columns that its forward reads beside the token ids."""

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: DeviceMesh | None = None,
        device: str = "cpu",
        options: ModelOptions = ModelOptions(),
    ) -> Self:
        """The model in `folder`, sharded over the mesh, on the device. Raises ValueError for one that is refused."""

    @property
    def device(self) -> torch.device:
        """Where its weights are, and a pack must be."""

    @property
    def vocab_size(self) -> int:
        """Entries of its vocabulary."""

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        """What an optimizer moves, by name; with tied embeddings once."""

    def export(self, *, untie: bool = True) -> Iterator[Exported]:
        """Every tensor of a checkpoint in a fixed order; all ranks go through it together.

        untie: with tied embeddings the head is exported too, as a copy, for engines that load them apart.
        """

    def gather(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the export, one at a time: all ranks go through it together."""


class FrozenPolicy(Protocol):
    """What is asked of a policy that is only compared with: a reference."""

    @property
    def device(self) -> torch.device: ...

    def export(self, *, untie: bool = True) -> Iterator[Exported]: ...

    def __call__(self, pack: Pack, *, temperature: float = 1.0, entropy_gradient: bool = False) -> PolicyOutput:
        """Log pi(token | tokens of its sequence before it) and the entropy of that distribution, in nats.

        Both are 0 where `pack.mask` is not set and at the first token of a sequence. The entropy has a gradient only
        where it is asked for.
        """


class PolicyModel(Model, FrozenPolicy, Protocol):
    """What is trained and published."""

    def adapters(self) -> Iterator[Exported]:
        """What is trained beside weights that stand still, for engines that add it by themselves."""


class CriticModel(Model, Protocol):
    """What estimates returns."""

    def __call__(self, pack: Pack) -> Tensor:
        """(T,) float32 values of the contexts before generated tokens, 0 elsewhere."""


def is_frozen(tensor: Tensor) -> bool:
    """Whether it is a parameter that stands still: its files have it."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor that may be sharded, without a gradient."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@contextmanager
def holding(policy: Model, rows: Iterable[Tensor]) -> Iterator[None]:
    """This rank's rows of all that is trained are these meanwhile; not between a forward and its backward."""
    own = [local(each) for _, each in policy.trainable()]
    present = [each.clone() for each in own]
    try:
        for each, value in zip(own, rows, strict=True):
            each.copy_(value)
        yield
    finally:
        for each, value in zip(own, present, strict=True):
            each.copy_(value)


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded: all ranks call it together."""
    full: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full

"""The critic of PPO: a transformer of its own with a value head, packed and FSDP-sharded like the policy.

V_t is the value of the context before generated token t, so it stands at t like the token's log-probability. The head
starts at zero: the first advantages are then the rewards themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.models.packed_attention import Kernel
from rl.models.packing import Pack
from rl.models.policy import DEFAULTS, PackedModel, Policy, at_targets, load_packed
from rl.models.protocol import ModelOptions


class Critic(PackedModel):
    """`model` is a decoder without a head (transformers' `get_decoder()`)."""

    def __init__(self, decoder: nn.Module, attention: Kernel = DEFAULTS.attention) -> None:
        super().__init__(decoder, attention)
        self.head = nn.Linear(self.model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        mesh: DeviceMesh | None = None,
        device: str = "cpu",
        options: ModelOptions = ModelOptions(),
    ) -> Critic:
        """The critic on the decoder of the model in `folder`; see `rl.models.protocol`."""
        attention = options.attention
        return load_packed(folder, lambda model: Critic(Policy(model).decoder, attention), mesh, device, options)

    def _exported(self, untie: bool) -> Iterator[tuple[str, Tensor]]:
        return iter(self.named_parameters())

    def forward(self, pack: Pack) -> Tensor:
        """See `rl.models.protocol`."""
        layout = pack.laid_out().layout
        assert layout is not None
        with self.autocast():
            values = self.head(self.contexts(pack, layout))[:, 0].float()  # (S,)
        return at_targets(values, pack, layout)

"""The bare learner that ours is measured against: torch and transformers, nothing of the learner's own loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl.models.layout import Layout, lay_out
from rl.models.packed_attention import NAME
from rl.models.packing import Pack
from rl.wire.run import RunFile

Form = Literal["stock", "packed", "shared"]
"""How a forward reads a pack. `stock`: one batch of (samples, length) with torch's own causal attention; samples may
end with padding, which no token before it sees. `packed`: one row, each sample blind to the others. `shared`: likewise,
and a prompt that several samples have in common is computed once."""


class BareLoop:
    """The model of a run and its optimizer; below float32 its forward runs under torch's own autocast."""

    def __init__(self, run: RunFile, form: Form) -> None:
        self._form = form
        self._device, self._dtype = run.device, getattr(torch, run.config.model.dtype)
        self.model = _model(run, "sdpa" if form == "stock" else NAME)
        self.model.train()
        self._adamw = torch.optim.AdamW(self.model.parameters(), lr=1e-6, betas=(0.9, 0.95), fused=True)

    def prepared(self, packs: Sequence[Pack]) -> list[Pack]:
        """The packs as `step` wants them: on the model's device, with the layout of this form."""
        if self._form == "packed":  # as if no two sequences began alike
            columns = [[each.numpy() for each in (pack.token_ids, pack.sample)] for pack in packs]
            layouts = [
                lay_out(read, pack.position_ids.numpy(), pack.mask.numpy())
                for read, pack in zip(columns, packs, strict=True)
            ]
            packs = [replace(pack, layout=layout) for pack, layout in zip(packs, layouts, strict=True)]
        return [pack.to(self._device) for pack in packs]

    def step(self, packs: Sequence[Pack], tokens: int) -> None:
        """Forward, clipped loss, backward, clip and fused AdamW; the head runs on generated positions only.

        packs: of `prepared`. tokens: all that were generated in them, which the loss is divided by.
        """
        for pack in packs:
            assert pack.layout is not None
            wanted = pack.layout.targets  # (S,) generated tokens; the logits before each predict it
            with torch.autocast(self._device, self._dtype, enabled=self._dtype != torch.float32):
                logp = self.logp(pack, pack.layout)

            ratio = (logp - pack.logp_behavior[wanted]).exp()
            advantages = pack.advantages[wanted]
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum() / tokens
            loss.backward()

        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)

    def logp(self, pack: Pack, layout: Layout) -> Tensor:
        """(S,) of the generated tokens, by torch's own head."""
        logits = self.model.lm_head(self.contexts(pack, layout))  # (S, vocab)
        return -F.cross_entropy(logits.float(), pack.token_ids[layout.targets], reduction="none")

    def contexts(self, pack: Pack, layout: Layout) -> Tensor:
        """(S, H): the state before each generated token."""
        ids, positions = pack.token_ids, pack.position_ids
        places, rows = layout.targets - 1, len(pack.rewards)
        segments: dict[str, Any] = {}
        if self._form != "stock":
            ids, positions = ids[layout.tokens], positions[layout.tokens]
            places, rows = layout.rows, 1
            segments = {"segments": layout.segments}

        ids, positions = ids.view(rows, -1), positions.view(rows, -1)
        output = self.model.model(ids, position_ids=positions, use_cache=False, **segments)
        hidden: Tensor = output.last_hidden_state.flatten(0, 1)
        return hidden[places]


def _model(run: RunFile, attention: str) -> Any:
    """The model with float32 weights, as the learner's, on the run's device."""
    folder = str(run.model_folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
    return model.to(run.device)

"""What one rank trains: policy, frozen reference and critic, and how a batch changes them. No sockets.

The learner drives it with shards of the broker, `experiments/plain_loop.py` with batches sampled in the same process.
All ranks call the same methods in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rl.core.config import Config
from rl.core.messages import Shard
from rl.learner.algorithm import make_algorithm
from rl.learner.credit import Minibatch, all_reduce, assign, kept_rows, mask_rows
from rl.learner.critic import Critic, accumulate_critic, load_critic, with_values
from rl.learner.optimizer import Optimizer
from rl.learner.packing import make_packs, pad_packs, split_minibatches
from rl.learner.policy import M, PackedModel, Policy, load_policy, shard_policy
from rl.learner.update import UpdateStats, accumulate_gradients, with_logp

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Trainer:
    """`before_forward` is called before every forward of any of the models."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        last_step: int,
        mesh: DeviceMesh | None = None,
        device: str = "cpu",
        before_forward: Callable[..., None] | None = None,
    ) -> None:
        """folder: the starting weights. Raises ValueError for settings or models that do not fit together."""
        self._config, self._folder, self._mesh, self._device = config, folder, mesh, device
        self._ranks = 1 if mesh is None else mesh.size()
        self.algorithm = make_algorithm(config)
        chunk, critic = config.learner.logprob_chunk, self.algorithm.critic
        self.policy: Policy = self._place(load_policy(folder, logprob_chunk=chunk, device=device))
        self.optimizer = Optimizer(
            self.policy, config.learner, last_step, still_steps=critic.pretrain_steps if critic else 0
        )
        self.reference: Policy | None = None
        if self.algorithm.reference is not None:
            frozen = load_policy(self._model(self.algorithm.reference), logprob_chunk=chunk, device=device)
            self._check_vocabulary("algo.kl.reference", frozen)
            self.reference = self._place(frozen.requires_grad_(False))
        self.critic: Critic | None = None
        if critic is not None:
            head = load_critic(self._model(critic.path), device=device)
            self._check_vocabulary("algo.critic.path", head)
            self.critic = self._place(head)
            settings = config.learner.model_copy(update={"lr": critic.lr, "warmup_steps": critic.warmup_steps})
            self.critic_optimizer = Optimizer(self.critic, settings, last_step)
        for model in (self.policy, self.reference, self.critic):
            if model is not None and before_forward is not None:
                model.register_forward_pre_hook(before_forward)

    def minibatches(self, shard: Shard) -> list[Minibatch]:
        """This rank's part of each optimizer step, complete for the loss; every rank gets equally many packs.

        Everything in it is of the weights before the first of these steps.
        """
        settings, temperature = self._config.learner, self._config.sampling.temperature
        kept = kept_rows(shard, self.algorithm)
        packed = [
            mask_rows(make_packs(part, settings.max_tokens_per_pack, shard.step), kept)
            for part in split_minibatches(shard, settings.minibatches)
        ]
        counts = all_reduce(torch.tensor([max(1, len(packs)) for packs in packed]), "max")  # (minibatches,)
        parts = [pad_packs(packs, int(count)) for packs, count in zip(packed, counts, strict=True)]
        if self.algorithm.needs_proximal and len(parts) > 1:
            parts = [with_logp(self.policy, part, "logp_proximal", temperature=temperature) for part in parts]
        if self.reference is not None:
            parts = [with_logp(self.reference, part, "logp_reference", temperature=temperature) for part in parts]
        if self.critic is not None:
            parts = [with_values(self.critic, part) for part in parts]
        return assign(shard, parts, self.algorithm)

    def accumulate(self, minibatch: Minibatch) -> UpdateStats:
        """Add this rank's part of the policy's gradient."""
        return accumulate_gradients(
            self.policy, minibatch.packs, self.algorithm.loss,
            correction=self.algorithm.correction, regularisation=self.algorithm.regularisation,
            temperature=self._config.sampling.temperature, global_tokens=minibatch.loss_tokens, world_size=self._ranks,
            first_step=self._config.learner.minibatches == 1,
        )  # fmt: skip

    def update(self, minibatch: Minibatch, step: int) -> UpdateStats:
        """One optimizer step of the policy on batch `step`, and `algo.critic.epochs` of the critic."""
        stats = self.accumulate(minibatch)
        norm, rate = self.optimizer.step(step)
        stats.steps = {"train/grad_norm": [norm], "train/lr": [rate]}
        if self.critic is not None:
            self._update_critic(self.critic, minibatch, step, stats)
        return stats

    def _update_critic(self, critic: Critic, minibatch: Minibatch, step: int, stats: UpdateStats) -> None:
        assert self.algorithm.critic is not None
        for _ in range(self.algorithm.critic.epochs):
            sums = accumulate_critic(
                critic, minibatch.packs, global_tokens=minibatch.loss_tokens, world_size=self._ranks,
                clip=self.algorithm.critic.clip,
            )  # fmt: skip
            norm, _rate = self.critic_optimizer.step(step)
            stats.critic.add(sums)
            stats.steps.setdefault("critic/grad_norm", []).append(norm)

    def trained(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """What a checkpoint holds, by name."""
        models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {"policy": (self.policy, self.optimizer.adamw)}
        return models if self.critic is None else models | {"critic": (self.critic, self.critic_optimizer.adamw)}

    def _place(self, model: M) -> M:
        settings = self._config.learner
        return shard_policy(
            model,
            compute_dtype=_DTYPES[self._config.model.dtype],
            activation_checkpointing=settings.activation_checkpointing,
            mesh=self._mesh,
            device=self._device,
        )

    def _model(self, path: str) -> Path:
        return self._folder if path == "start" else Path(path)

    def _check_vocabulary(self, field: str, model: PackedModel) -> None:
        theirs, ours = model.model.config.vocab_size, self.policy.model.config.vocab_size
        if theirs != ours:
            raise ValueError(f"{field}: a vocabulary of {theirs} entries, the policy has {ours}")

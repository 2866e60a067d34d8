"""What one rank trains: policy, frozen reference and critic, and how a batch changes them. The module has no sockets.

The learner drives it with batch parts of the broker, `experiments/plain_loop.py` with batches sampled in the same
process.
All ranks call the same methods in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl.config.lora import LoraOptions, lora_options
from rl.config.schema import Config, LearnerConfig
from rl.learner import checkpoint
from rl.learner.algorithm import make_algorithm
from rl.learner.credit import Minibatch, all_reduce, assign, kept_rows, mask_rows
from rl.learner.host_weights import HostWeights
from rl.learner.moves import Moves
from rl.learner.routing import replay_gap
from rl.learner.update import (
    Observer,
    UpdateStats,
    accumulate_critic,
    accumulate_gradients,
    unobserved,
    with_logp,
    with_values,
)
from rl.models.adapter_files import adapter, peft_config
from rl.models.loading import copied
from rl.models.lora import is_adapter
from rl.models.packing import make_packs, pad_packs, split_minibatches
from rl.models.policy import Base, Critic, PackedModel, Policy
from rl.models.protocol import FrozenPolicy, Model, ModelOptions, whole
from rl.models.team import Team
from rl.wire.columns import forward_columns
from rl.wire.messages import BatchPart

M = TypeVar("M", bound=Model)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def learning_rate(config: LearnerConfig, step: int, last_step: int, over: float = 0.0) -> float:
    """Learning rate of batch `step` (0-based) in a run whose last batch is `last_step - 1`.

    Linear warm-up over `warmup_steps` batches, the first of which already moves (lr / warmup_steps); then
    constant, or down to `min_lr_fraction * lr` at the last batch, linearly or along half a cosine. `over` is the share
    of the run's time: where it is the larger one, it counts in the place of the share of the steps.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    length = max(1, last_step - 1 - config.warmup_steps)
    done = min(1.0, max(over, (step - config.warmup_steps) / length))
    shape = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_fraction + (1 - config.min_lr_fraction) * shape)


def saved_policy(config: Config, folder: Path, saved: Path) -> Policy:
    """The policy of the checkpoint `saved`, whose run began with the model in `folder`: in float32, on the CPU."""
    options = lora_options(config.model)
    lora = options and options.model_copy(update={"start": None})  # the checkpoint has what became of it
    policy = Policy.load(folder, options=ModelOptions(lora=lora))
    checkpoint.load_policy(saved, policy)
    return policy


def export_adapter(policy: Policy, options: LoraOptions, config: Config, start: Path, folder: Path) -> None:
    """The adapters of the policy, which belong to the model in `start`, as a folder that peft and vLLM read."""
    named = config.model.path if "/" in config.model.path and not Path(config.model.path).exists() else str(start)
    told = peft_config(policy.model, options, named)
    checkpoint.export_adapter(adapter(policy.model), told, folder)


def _by_rows(gradient: Tensor) -> Tensor:
    """What has the same norm. A CPU adds up the squares of a whole tensor in eight numbers of float32, one behind the
    other: of 152k x 2 048 that is 5 % too little. So it does each row by itself."""
    is_large = gradient.device.type == "cpu" and gradient.ndim > 1
    return torch.linalg.vector_norm(gradient, dim=-1) if is_large else gradient


def _watch_layers(model: PackedModel, tell: Callable[..., None]) -> None:
    """`tell` is called before each layer's forward and backward."""

    def computed(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if hidden.requires_grad:
            hidden.register_hook(tell)

    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(tell)
        layer.register_forward_hook(computed)


class Optimizer:
    """AdamW with warm-up and decay of the learning rate, and clipping by the global gradient norm.

    `step` clips, sets the learning rate and updates; gradients are cleared afterwards. The schedule is a pure function
    of the batch that is being trained, which carries the share of the run's time: a checkpoint needs no state for it.
    """

    def __init__(
        self,
        trainable: Iterable[tuple[str, nn.Parameter]],
        config: LearnerConfig,
        last_step: int,
        still_steps: int = 0,
        host: HostWeights | None = None,
    ) -> None:
        """trainable: parameters by name; `host` has them where they are not the model's own.

        still_steps: batches during which nothing moves yet, though AdamW's moments already follow the gradient.
        """
        self._host = host
        self._config = config
        self._last_step = last_step
        self._still_steps = still_steps

        self._parameters = [parameter for _, parameter in trainable]
        matrices = [parameter for parameter in self._parameters if parameter.ndim >= 2]
        vectors = [parameter for parameter in self._parameters if parameter.ndim < 2]  # norms and biases: no decay
        groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": config.weight_decay}]
        if vectors:
            groups.append({"params": vectors, "weight_decay": 0.0})
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)

    def step(self, batch_step: int, over: float = 0.0) -> tuple[float, float]:
        """One update with the accumulated gradients. Returns (gradient norm before clipping, learning rate).

        Raises FloatingPointError, with the parameters untouched, when the norm is not finite.
        """
        if self._host is not None:
            self._host.fetch_gradients()
        gradients = [_by_rows(each.grad) for each in self._parameters if each.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch.nn.utils.clip_grads_with_norm_(self._parameters, self._config.max_grad_norm, norm)
        grad_norm = float(whole(norm))
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient norm of step {batch_step} is {grad_norm}")

        rate = 0.0
        if batch_step >= self._still_steps:
            still = self._still_steps
            rate = learning_rate(self._config, batch_step - still, self._last_step - still, over)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        if self._host is not None:
            self._host.give_back()
        return grad_norm, rate


class Trainer:
    """`before_forward` is called before every forward of any of the models, `before_layer` before each of its layers,
    also where a backward computes it again. Before the backward of a layer it is called as well."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        *,
        last_step: int,
        mesh: DeviceMesh | None = None,
        team: Team | None = None,
        device: str = "cpu",
        before_forward: Callable[..., None] | None = None,
        before_layer: Callable[..., None] | None = None,
        at_rest: bool = False,
    ) -> None:
        """folder: the starting weights. team: ranks that get the same batch parts, and compute each pack together.
        at_rest: what is trained begins on the host, until `moves.to_device`.

        Raises ValueError for settings or models that do not fit together.
        """
        self.config = config
        self._folder = folder
        self._mesh = mesh
        self._device = device
        self._last_step = last_step
        self._on_host = config.learner.optimizer_states == "host"
        self._begins_on = "cpu" if self._on_host or at_rest else device
        self._team = team
        self.counted = None if team is None else team.counted
        self._observe: Observer = unobserved
        self._ranks = 1 if mesh is None else mesh.size()

        self.algorithm = make_algorithm(config)
        critic = self.algorithm.critic
        self.lora = lora_options(config.model)
        self.policy = self._load(Policy, "start", self.lora, config.replays_routers)
        self._check_columns()
        still_steps = critic.pretrain_steps if critic else 0
        self.weights, self.optimizer = self._held(self.policy, config.learner, still_steps)

        self.reference: FrozenPolicy | None = None
        if self.algorithm.reference == "start" and self.lora is not None:
            self.reference = Base(self.policy, keep=self.lora.start is not None)
        elif self.algorithm.reference is not None:
            reference = self._load(Policy, self.algorithm.reference).requires_grad_(False)
            if self._on_host:
                copied(reference, device, _DTYPES[config.model.dtype])
            self._check_vocabulary("algo.kl.reference", reference)
            self.reference = reference

        self.critic: Critic | None = None
        if critic is not None:
            self.critic = self._load(Critic, critic.path)
            self._check_vocabulary("algo.critic.path", self.critic)
            settings = config.learner.model_copy(update={"lr": critic.lr})
            self._critic_weights, self.critic_optimizer = self._held(self.critic, settings)

        for model in self._models():
            if before_forward is not None:
                model.register_forward_pre_hook(before_forward)
            if before_layer is not None:
                _watch_layers(model, before_layer)

    @cached_property
    def moves(self) -> Moves:
        """What is computed with, between host and device. What the optimizer has on the host anyway stays."""
        if self._on_host:
            return Moves([], [], self._device)
        return Moves(self._models(), [adamw for _, adamw in self.trained().values()], self._device)

    def _models(self) -> list[Any]:
        """All that compute; a reference that is the policy without its adapters is none."""
        return [model for model in (self.policy, self.reference, self.critic) if isinstance(model, nn.Module)]

    def observed_by(self, observe: Observer) -> None:
        """`observe` sees every pack of the policy's update, on one rank of a team."""
        if self._team is None or self._team.index == 0:
            self._observe = observe

    def minibatches(self, batch_part: BatchPart) -> list[Minibatch]:
        """This rank's part of each optimizer step, complete for the loss; every rank gets equally many packs.

        Everything in it is of the weights before the first of these steps.
        """
        settings = self.config.learner
        most = settings.pack_tokens(self.policy.device.type)
        kept = kept_rows(batch_part, self.algorithm)
        packed = [
            mask_rows(make_packs(part, most, batch_part.step), kept)
            for part in split_minibatches(batch_part, settings.minibatches)
        ]
        counts = all_reduce(torch.tensor([max(1, len(packs)) for packs in packed]), "max")  # (minibatches,)
        parts = [
            [pack.laid_out((0, 1) if self._team is None else self._team.part) for pack in pad_packs(packs, int(count))]
            for packs, count in zip(packed, counts, strict=True)
        ]

        temperature = self.config.sampling.temperature
        if self.algorithm.needs_proximal and len(parts) > 1:
            parts = [with_logp(self.policy, part, "logp_proximal", temperature=temperature) for part in parts]
        if self.reference is not None:
            parts = [with_logp(self.reference, part, "logp_reference", temperature=temperature) for part in parts]
        if self.critic is not None:
            parts = [with_values(self.critic, part) for part in parts]
        return assign(batch_part, parts, self.algorithm, self.counted)

    def replay_gap(self, minibatches: list[Minibatch]) -> dict[str, float]:
        """What router replay is worth in this batch, which has not been trained yet."""
        return replay_gap(self.policy, minibatches[0].packs, self.config.sampling.temperature)

    def accumulate(self, minibatch: Minibatch) -> UpdateStats:
        """Add this rank's part of the policy's gradient."""
        return accumulate_gradients(
            self.policy,
            minibatch.packs,
            self.algorithm,
            temperature=self.config.sampling.temperature,
            global_tokens=minibatch.loss_tokens,
            world_size=self._ranks,
            first_step=self.config.learner.minibatches == 1,
            observe=self._observe,
        )

    def update(self, minibatch: Minibatch, step: int, over: float = 0.0) -> UpdateStats:
        """One optimizer step of the policy on batch `step`, and `algo.critic.epochs` of the critic.

        over: share of the run's time.
        """
        stats = self.accumulate(minibatch)
        norm, rate = self.optimizer.step(step, over)
        stats.steps = {"train/grad_norm": [norm], "train/lr": [rate]}
        if self.critic is None or self.algorithm.critic is None:
            return stats

        packs = minibatch.packs
        tokens = minibatch.loss_tokens
        clip = self.algorithm.critic.clip
        for _ in range(self.algorithm.critic.epochs):
            sums = accumulate_critic(self.critic, packs, global_tokens=tokens, world_size=self._ranks, clip=clip)
            norm, _rate = self.critic_optimizer.step(step, over)
            stats.critic.add(sums)
            stats.steps.setdefault("critic/grad_norm", []).append(norm)
        return stats

    def trained(self) -> dict[str, tuple[nn.Module, torch.optim.Optimizer]]:
        """What a checkpoint holds, by name."""
        models: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {"policy": (self.weights, self.optimizer.adamw)}
        if self.critic is not None:
            models["critic"] = (self._critic_weights, self.critic_optimizer.adamw)
        return models

    def _held(
        self, model: PackedModel, settings: LearnerConfig, still_steps: int = 0
    ) -> tuple[PackedModel | HostWeights, Optimizer]:
        """What has the weights of `model` that its optimizer moves, in float32, and the optimizer."""
        host = None
        if self._on_host:
            adapters = any(is_adapter(name) for name, _ in model.trainable())  # whose sums are made in float32
            dtype = None if adapters else _DTYPES[self.config.model.dtype]
            host = HostWeights(model, self._device, dtype, _DTYPES[settings.reduce_dtype])
        weights = model if host is None else host
        return weights, Optimizer(weights.trainable(), settings, self._last_step, still_steps, host)

    def _load(self, kind: type[M], path: str, lora: LoraOptions | None = None, replay: bool = False) -> M:
        folder = self._folder if path == "start" else Path(path)
        settings = self.config.learner

        options = ModelOptions(
            dtype=_DTYPES[self.config.model.dtype],
            reduce_dtype=_DTYPES[settings.reduce_dtype],
            activation_checkpointing=settings.activation_checkpointing,
            logprob_chunk=settings.logprob_chunk,
            attention=settings.attention,
            compile=settings.compile,
            lora=lora,
            router_replay=replay,
            team=self._team,
        )
        return kind.load(folder, self._mesh, self._begins_on, options)

    def _check_columns(self) -> None:
        """A column that nothing reads would be routed through the whole run for nothing, and nobody would be told."""
        for column in forward_columns():
            if column.name not in self.policy.reads:
                model = type(self.policy).__name__
                raise ValueError(
                    f"algo.columns: {column.name!r} says reads='forward', and the forward of {model} does not read it; "
                    "say reads='loss', or train a model that reads it"
                )

    def _check_vocabulary(self, field: str, model: Model) -> None:
        theirs = model.vocab_size
        ours = self.policy.vocab_size
        if theirs != ours:
            raise ValueError(f"{field}: a vocabulary of {theirs} entries, the policy has {ours}")

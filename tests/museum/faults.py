"""The museum's pieces: one function each, which spoils a run (docs/silent-faults.md tells what each costs)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from zlib import crc32

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from rl.learner.credit import Minibatch
from rl.learner.guards import StepGuards
from rl.models import lora
from rl.models.head import token_logprobs
from rl.models.layout import Layout, lay_out
from rl.models.packing import Pack
from rl.models.policy import Base, Policy
from rl.wire.messages import BatchPart, Generate, Trajectory, Version, WeightStatus
from rollout.episodes.environment import ChatMessage
from tests.museum.lab import STOPS, Game, Lab
from tests.rl.learner.tiny_policies import VOCAB
from tests.rollout.trajectories import with_sequence

Spoil = Callable[[Lab, pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Fault:
    """`alarm` must be raised within three steps, `at` being the first whose data show the fault."""

    spoil: Spoil
    alarm: str
    at: int = 0
    overrides: tuple[str, ...] = ()
    steps: int = 3


FAULTS: dict[str, Fault] = {}


def fault(name: str, alarm: str, *overrides: str, at: int = 0, steps: int = 3) -> Callable[[Spoil], Spoil]:
    def keep(spoil: Spoil) -> Spoil:
        FAULTS[name] = Fault(spoil, alarm, at, overrides, steps)
        return spoil

    return keep


# ---------------------------------------------------------------- weights


def applied(lab: Lab, change: Callable[[dict[str, Tensor], int], dict[str, Tensor]]) -> None:
    """The engine applies `change(weights, version)` in the place of the weights."""
    load, apply = lab.engine.load, lab.engine.apply

    def spoilt(version: Version, *rest: Any) -> WeightStatus:
        vars(lab.engine)["apply"] = lambda weights: apply(change(weights, version.n))
        return load(version, *rest)

    vars(lab.engine)["load"] = spoilt


@fault("weights-undelivered", "weights-differ")
def weights_undelivered(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    applied(lab, lambda weights, n: {} if n else weights)


@fault("weights-half", "weights-differ")
def weights_half(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    applied(lab, lambda weights, n: dict(list(weights.items())[:: 2 if n else 1]))


@fault("weights-damaged", "weights-differ")
def weights_damaged(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def torn(slot: memoryview) -> memoryview:
        damaged = bytearray(slot)
        damaged[len(damaged) // 2] ^= 1
        return memoryview(damaged)

    vars(lab)["arrived"] = torn


@fault("weights-of-another", "weights-differ")
def weights_of_another(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    applied(lab, lambda weights, n: {name: tensor * 1.1 for name, tensor in weights.items()})


@fault("adapters-left-out", "weights-differ", "model.lora={rank: 4}", at=1)
def adapters_left_out(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lora, "sums", lambda model: {})


@fault("adapters-too-strong", "weights-differ", "model.lora={rank: 4}", at=1)
def adapters_too_strong(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The export multiplies by alpha alone."""
    sums, weights = lora.sums, dict(lab.trainer.policy.model.named_parameters())

    def stronger(name: str, merged: Callable[..., Tensor], part: Callable[[Tensor], Tensor]) -> Tensor:
        return 4 * merged(part) - 3 * part(weights[name])

    patch.setattr(
        lora, "sums", lambda model: {name: partial(stronger, name, each) for name, each in sums(model).items()}
    )


@fault("stale-head", "weights-differ")
def stale_head(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    applied(lab, lambda weights, n: {name: tensor for name, tensor in weights.items() if "lm_head" not in name})


@fault("moe-reload", "weights-differ")
def moe_reload(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """As the CPU engine did it: the second load finds experts that were repacked by the first."""

    def repacked(weights: dict[str, Tensor], n: int) -> dict[str, Tensor]:
        return {name: tensor.flip(0) if n and "down_proj" in name else tensor for name, tensor in weights.items()}

    applied(lab, repacked)


@fault("old-kv", "log-ratio", at=1)
def old_kv(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    load = lab.engine.load
    old = copy.deepcopy(lab.engine.model)

    def keep_then_load(version: Version, *rest: Any) -> WeightStatus:
        if version.n:
            old.load_state_dict(lab.engine.model.state_dict())
        return load(version, *rest)

    def logits(ids: list[list[int]]) -> Tensor:
        """The first ids of each context are in the cache, from before the update."""
        found = []
        for context in ids:
            cache = old(torch.tensor([context[:5]]), use_cache=True).past_key_values
            found.append(lab.engine.model(torch.tensor([context[5:]]), past_key_values=cache).logits[0, -1])
        return torch.stack(found)

    vars(lab.engine)["load"] = keep_then_load
    vars(lab.engine)["logits"] = logits


@fault("version-early", "log-ratio", at=1)
def version_early(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The stamp is the new one, and the probe's answer; requests still run on the weights before."""
    load = lab.engine.load

    def late(version: Version, *rest: Any) -> WeightStatus:
        before = copy.deepcopy(lab.engine.model.state_dict())
        status = load(version, *rest)
        if version.n:
            lab.engine.model.load_state_dict(before)
        return status

    vars(lab.engine)["load"] = late


# ---------------------------------------------------------------- log-probabilities


@fault("temperature-learner", "log-ratio")
def temperature_learner(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    sampling = lab.config.sampling.model_copy(update={"temperature": 1.0})
    lab.trainer.config = lab.config.model_copy(update={"sampling": sampling})


@fault("temperature-engine", "log-ratio")
def temperature_engine(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    plain = lab.engine.draw

    def draw(logits: Tensor, request: Generate) -> tuple[int, float]:
        token, _ = plain(logits, request)
        return token, float(logits.log_softmax(-1)[token])

    vars(lab.engine)["draw"] = draw


@fault("logp-shifted", "log-ratio")
def logp_shifted(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    columns = lab.engine.columns
    vars(lab.engine)["columns"] = lambda ids, logp: columns(ids, [logp[-1], *logp[:-1]])


@fault("sampler-truncated", "surprise", "rollout.group_size=4")
def sampler_truncated(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def top_p(logits: Tensor, request: Generate) -> tuple[int, float]:
        logp = (logits / request.temperature).log_softmax(-1)
        ordered, order = logp.exp().sort(descending=True)
        inside = ordered.cumsum(-1) - ordered < 0.8
        token = int(order[torch.multinomial(ordered * inside, 1, generator=lab.engine.random)])
        return token, float(logp[token])

    vars(lab.engine)["draw"] = top_p


@fault("greedy-training", "surprise")
def greedy_training(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def greedy(logits: Tensor, request: Generate) -> tuple[int, float]:
        logp = (logits / request.temperature).log_softmax(-1)
        return int(logp.argmax()), float(logp.max())

    vars(lab.engine)["draw"] = greedy


@fault("same-seed", "no-diversity")
def same_seed(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    plain = lab.engine.draw
    randoms: dict[tuple[int, int], torch.Generator] = {}

    def draw(logits: Tensor, request: Generate) -> tuple[int, float]:
        seed = crc32(request.prompt_ids.tobytes())
        lab.engine.random = randoms.setdefault(
            (request.session, len(request.prompt_ids)), torch.Generator().manual_seed(seed)
        )
        return plain(logits, request)

    vars(lab.engine)["draw"] = draw


@fault("rotary-cast", "weights-differ")
def rotary_cast(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    class LongGame(Game):
        async def reset(self, task: int) -> list[ChatMessage]:
            return [ChatMessage("user", " ".join(str(11 + (7 * task + place) % 50) for place in range(150)))]

    lab.environment = LongGame
    rotary = lab.engine.model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.bfloat16().float()


@fault("rotary-garbage", "weights-differ")
def rotary_garbage(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """As `to_empty` leaves the buffers of a model that is loaded by parts."""
    lab.trainer.policy.decoder.rotary_emb.inv_freq.zero_()


@fault("head-cast", "weights-differ")
def head_cast(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The engine's head stays in float32."""

    def cast(hidden: Tensor, head: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, head.bfloat16().float(), *rest, **more)

    patch.setattr("rl.models.policy.token_logprobs", cast)


@fault("dropout-on", "weights-differ")
def dropout_on(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    for layer in lab.trainer.policy.decoder.layers:
        layer.mlp.register_forward_hook(lambda module, inputs, output: torch.nn.functional.dropout(output, 0.1))


# ---------------------------------------------------------------- packing, masks, tokens


@fault("cross-attention", "weights-differ")  # the probe has a neighbour in its pack
def cross_attention(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def one_sample(read: list[np.ndarray], positions: np.ndarray, mask: np.ndarray) -> Layout:
        return lay_out(read, np.arange(len(positions)), mask)

    patch.setattr("rl.models.packing.lay_out", one_sample)


@fault("state-leaks", "weights-differ")
def state_leaks(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """Both sides have a short convolution, and in a pack it reads on from one sample into the next."""

    def convolved(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + 0.5 * torch.nn.functional.pad(output, (0, 0, 1, 0))[:, :-1]

    for model in (lab.trainer.policy.model, lab.engine.model):
        model.model.layers[0].mlp.register_forward_hook(convolved)


def packed(lab: Lab, change: Callable[[Pack], Pack]) -> None:
    minibatches = lab.trainer.minibatches

    def spoilt(batch_part: BatchPart) -> list[Minibatch]:
        return [replace(each, packs=[change(pack) for pack in each.packs]) for each in minibatches(batch_part)]

    vars(lab.trainer)["minibatches"] = spoilt


@fault("position-ids", "log-ratio")
def position_ids(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    packed(lab, lambda pack: replace(pack, position_ids=torch.arange(pack.tokens), layout=None))


def assembled(lab: Lab, change: Callable[[BatchPart], dict[str, Any]]) -> None:
    """The broker sends batch parts with other values in some fields."""

    def spoilt(batch_part: BatchPart) -> BatchPart:
        return msgspec.structs.replace(batch_part, **change(batch_part))

    vars(lab)["assembled"] = spoilt


@fault("mask-late", "log-ratio")
def mask_late(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The mask, and with it what stands on masked tokens."""
    late = ("loss_mask", "logp_behavior", "policy_version")
    assembled(lab, lambda s: {"columns": s.columns | {name: np.roll(s.columns[name], 1) for name in late}})


@fault("eos-masked", "batch-contradicts")
def eos_masked(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def masked(batch_part: BatchPart) -> dict[str, Any]:
        mask = np.where(np.isin(batch_part.token_ids, STOPS), 0, batch_part.loss_mask).astype(np.uint8)
        return {"columns": batch_part.columns | {"loss_mask": mask}}

    assembled(lab, masked)


@fault("padding-trained", "loss-tokens")
def padding_trained(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def padded(pack: Pack) -> Pack:
        columns = {name: torch.cat([values, values.new_zeros(16)]) for name, values in pack.columns.items()}
        columns["loss_mask"][-16:] = True
        more = pack.position_ids[-1] + 1 + torch.arange(16)
        return replace(
            pack,
            columns=columns,
            position_ids=torch.cat([pack.position_ids, more]),
            sample=torch.cat([pack.sample, pack.sample[-1:].expand(16)]),
            layout=None,
        )

    packed(lab, padded)


@fault("observations-trained", "batch-contradicts")
def observations_trained(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def unmasked(batch_part: BatchPart) -> dict[str, Any]:
        mask = np.where(np.isin(batch_part.token_ids, [20, 21, 22]), 1, batch_part.loss_mask).astype(np.uint8)
        return {"columns": batch_part.columns | {"loss_mask": mask}}

    assembled(lab, unmasked)


@fault("retokenised", "log-ratio")
def retokenised(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """Some ids have texts that encode to others."""

    def again(trajectories: list[Trajectory]) -> list[Trajectory]:
        changed = []
        for each in trajectories:
            ids = each.sequence.token_ids
            other = np.where((each.sequence.loss_mask != 0) & (ids > 60), 12, ids).astype(np.int32)
            changed.append(with_sequence(each, token_ids=other))
        return changed

    vars(lab)["delivered"] = again


@fault("double-bos", "double-start")
def double_bos(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    class Doubled(Game):
        async def reset(self, task: int) -> list[ChatMessage]:
            return [ChatMessage("user", "9 9"), *await super().reset(task)]

    lab.environment = Doubled


@fault("all-truncated", "truncated")
def all_truncated(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tests.museum.lab.STOPS", [])


@fault("ids-without-text", "ids-without-text")
def ids_without_text(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The model's vocabulary is padded beyond its tokenizer's, and nothing keeps it from sampling there."""
    patch.setattr("tests.museum.lab.IdTokenizer.textless", lambda self, ids: ids[ids >= VOCAB - 7])


# ---------------------------------------------------------------- the optimizer


@fault("lr-zero", "weights-still")
def lr_zero(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("rl.learner.trainer.learning_rate", lambda *_: 0.0)


@fault("frozen-layers", "weights-still")
def frozen_layers(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    lab.trainer.policy.decoder.layers[0].requires_grad_(False)


@fault("matrix-frozen", "weights-still")
def matrix_frozen(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """One of many, as where the optimizer's groups are made by names."""
    lab.trainer.policy.decoder.layers[0].mlp.gate_proj.requires_grad_(False)


@fault("all-masked", "gradient-zero", "algo.correction.mask=token", "algo.correction.low=1.5")
def all_masked(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The configuration itself is the fault: ratios are about 1."""


@fault("step-skipped", "optimizer-steps", "learner.minibatches=2")
def step_skipped(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    step = lab.trainer.optimizer.adamw.step
    calls = iter(range(1000))
    patch.setattr(lab.trainer.optimizer.adamw, "step", lambda: None if next(calls) % 2 else step())


@fault("normaliser-wrong", "loss-tokens", "learner.minibatches=2")
def normaliser_wrong(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    minibatches = lab.trainer.minibatches

    def per_pack(batch_part: BatchPart) -> list[Minibatch]:
        return [replace(each, loss_tokens=each.packs[0].loss_tokens) for each in minibatches(batch_part)]

    vars(lab.trainer)["minibatches"] = per_pack


@fault("grads-kept", "gradients-kept", at=1)
def grads_kept(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lab.trainer.optimizer.adamw, "zero_grad", lambda set_to_none: None)


@fault("stale-gathered", "weights-differ")
def stale_gathered(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    embedding: Any = lab.trainer.policy.model.get_input_embeddings()
    gathered = embedding.weight.detach().clone()
    patch.setattr(embedding, "forward", lambda ids: torch.nn.functional.embedding(ids, gathered))


@fault("reference-moves", "reference-moved", "algo.kl.coef=0.1", at=1)
def reference_moves(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    assert isinstance(lab.trainer.reference, Policy)
    trained = dict(lab.trainer.policy.named_parameters())
    for name, parameter in lab.trainer.reference.named_parameters():
        parameter.data = trained[name].data


@fault("reference-of-another", "reference-moved", "algo.kl.coef=0.1")
def reference_of_another(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """A checkpoint of another step, say, which then never moves."""
    assert isinstance(lab.trainer.reference, Policy)
    with torch.no_grad():
        for parameter in lab.trainer.reference.parameters():
            parameter.mul_(1.05)
    lab.guards = StepGuards(lab.trainer, lab.config, lab.alarms, first_step=0)


@fault("reference-trained", "reference-moved", "algo.kl.coef=0.1", "model.lora={rank: 4}", at=1)
def reference_trained(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The adapters stay on, where the model without them is asked."""
    policy = lab.trainer.policy
    patch.setattr(Base, "__call__", lambda self, pack, **options: torch.no_grad()(policy)(pack, **options))


@fault("ranks-disagree", "ranks-differ")
def ranks_disagree(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    another = torch.tensor([7, -7])
    patch.setattr("rl.learner.guards.all_reduce", lambda values, how: torch.maximum(values, another))


@fault("lr-too-high", "off-policy", "learner.lr=1.0", "rollout.alpha=1", at=1, steps=5)
def lr_too_high(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The configuration itself is the fault."""


@fault("entropy-collapse", "entropy", "alarms.limits.entropy.nats=0.02")
def entropy_collapse(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        lab.trainer.policy.decoder.norm.weight.mul_(1e3)  # more, and rounding alone shows in the probe


# ---------------------------------------------------------------- data, evaluation, time


@fault("data-stuck", "data-repeated", at=1)
def data_stuck(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    calls = iter(range(1000))
    patch.setattr(lab.core.groups.tasks.source, "next", lambda: next(calls) % 8)


@fault("eval-old-weights", "eval-incomplete", "rollout.alpha=1", "eval.tasks=4")
def eval_old_weights(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    """The gate is open too early: version 0 answers the evaluation of version 1, and is refused."""
    published = lab.core.published

    def with_evaluation(version: Version, now: float) -> Any:
        actions = published(version, now)
        return actions + (lab.core.eval_requested(version, 4, now) if version.n == 1 else [])

    patch.setattr(lab.core, "published", with_evaluation)
    applied(lab, lambda weights, n: {} if n else weights)
    load = lab.engine.load

    def behind(version: Version, *rest: Any) -> WeightStatus:
        status = load(version, *rest)
        lab.engine.version = Version(0, 0)
        return msgspec.structs.replace(status, version=lab.engine.version)

    vars(lab.engine)["load"] = behind


@fault("too-old", "stale-batch", at=2)
def too_old(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    def older(batch_part: BatchPart) -> dict[str, Any]:
        versions = np.where(batch_part.policy_version > 0, 0, batch_part.policy_version).astype(np.int32)
        return {"columns": batch_part.columns | {"policy_version": versions}}

    assembled(lab, older)


@fault("books-wrong", "batch-contradicts")
def books_wrong(lab: Lab, patch: pytest.MonkeyPatch) -> None:
    assembled(lab, lambda batch_part: {"metrics": batch_part.metrics | {"rollout/reward": 1.5}})

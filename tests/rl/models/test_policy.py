"""One process: packing, export, traps of sharding, and that a gradient does not depend on how the batch is cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from transformers import AutoConfig, Qwen3Config

from algos.registry import Loss, LossFunction, LossSpec, NoOptions, make_loss
from algos.types import LossInputs, LossResult
from rl.learner.update import accumulate_gradients, with_logp
from rl.models.packed_attention import check_layers
from rl.models.packing import Pack, dummy_pack, pad_packs
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions, Placement
from tests.rl.learner.tiny_policies import (
    VOCAB,
    algorithm_of,
    backward,
    everywhere,
    gradients,
    largest_difference,
    make_batch_parts,
    packs_of,
    save_tiny,
    stock_attention,
)

TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def untied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture
def policy(folder: Path) -> Policy:
    return Policy.load(folder, options=ModelOptions(logprob_chunk=16))


def one_pack() -> Pack:
    (pack,) = packs_of(make_batch_parts(1)[0], 10_000)
    return pack


def samples_of(values: Tensor, pack: Pack) -> list[Tensor]:
    return [values[pack.sample == i] for i in range(len(pack.members))]


def stock_logits(policy: Policy, token_ids: Tensor, **arguments: object) -> Tensor:
    """(T, V) by transformers' own attention."""
    with stock_attention(policy.model):
        logits: Tensor = policy.model(token_ids[None], **arguments).logits[0]
        return logits


def plain_logp(policy: Policy, token_ids: Tensor) -> Tensor:
    """(T - 1,) of one sample on its own, through the whole model and log_softmax."""
    logits = stock_logits(policy, token_ids, use_cache=False) / TEMPERATURE
    return logits[:-1].log_softmax(-1).gather(-1, token_ids[1:, None])[:, 0]


# ---------------------------------------------------------------- packing


def test_a_pack_equals_its_samples_one_by_one(policy: Policy) -> None:
    pack = one_pack()
    output = policy(everywhere(pack), temperature=TEMPERATURE)
    (output.logp * pack.advantages).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters()}
    policy.zero_grad()
    for logp, ids, advantage in zip(
        samples_of(output.logp, pack), samples_of(pack.token_ids, pack), samples_of(pack.advantages, pack), strict=True
    ):
        expected = plain_logp(policy, ids)

        assert logp[0] == 0
        torch.testing.assert_close(logp[1:], expected, rtol=0, atol=2e-5)
        (expected * advantage[1:]).sum().backward()
    alone = {name: parameter.grad for name, parameter in policy.model.named_parameters()}
    scale = max(float(grad.abs().max()) for grad in alone.values())
    assert largest_difference(packed, alone) < 2e-6 * scale


@pytest.mark.parametrize("wrong", [{"use_cache": True}, {"use_cache": False, "attention_mask": True}])
def test_trap_cache_or_mask_let_samples_see_each_other(policy: Policy, wrong: dict[str, bool]) -> None:
    """Why the policy calls the model as it does: the same pack with either of these is silently wrong."""
    pack = one_pack()
    arguments: dict[str, object] = dict(wrong)
    if "attention_mask" in wrong:
        arguments["attention_mask"] = torch.ones(1, pack.tokens, dtype=torch.int64)
    with torch.no_grad():
        right = policy(everywhere(pack), temperature=TEMPERATURE).logp
        logits = stock_logits(policy, pack.token_ids, position_ids=pack.position_ids[None], **arguments)
        shifted = (logits / TEMPERATURE).log_softmax(-1)[:-1].gather(-1, pack.token_ids[1:, None])[:, 0]
    inside = pack.position_ids[1:] > 0
    assert (shifted - right[1:])[inside & (pack.sample[1:] == 0)].abs().max() < 2e-5
    assert (shifted - right[1:])[inside & (pack.sample[1:] > 0)].abs().max() > 0.1


def test_packed_attention_refuses_what_it_would_get_wrong(policy: Policy) -> None:
    pack = one_pack()
    with pytest.raises(ValueError, match="segments of a pack"):
        policy.model(pack.token_ids[None], position_ids=pack.position_ids[None], use_cache=False)
    check_layers(Qwen3Config(layer_types=["full_attention", "sliding_attention"], num_hidden_layers=2))
    policy.model.config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="qwen3: layers of the kind chunked_attention"):
        Policy(policy.model)


def test_selected_positions_are_the_same_numbers(policy: Policy) -> None:
    pack = one_pack()
    with torch.no_grad():
        all_of_them = policy(everywhere(pack), temperature=TEMPERATURE)
        selected = policy(pack, temperature=TEMPERATURE)
    for whole, part in zip(all_of_them[:2], selected[:2], strict=True):
        torch.testing.assert_close(part[pack.mask], whole[pack.mask], rtol=0, atol=1e-5)
        assert not part[~pack.mask].any()
    logits = stock_logits(policy, pack.token_ids[pack.sample == 0], use_cache=False)[:-1] / TEMPERATURE
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(all_of_them.entropy[pack.sample == 0][1:], expected, rtol=0, atol=1e-5)


# ---------------------------------------------------------------- gradients


def test_cutting_into_packs_changes_nothing(policy: Policy) -> None:
    (batch_part,) = make_batch_parts(1)
    whole, whole_stats = backward(policy, packs_of(batch_part, 10_000), batch_part.loss_tokens)
    for max_tokens in (16, 50):
        packs = packs_of(batch_part, max_tokens)
        assert len(packs) > 1
        cut, cut_stats = backward(policy, packs, batch_part.loss_tokens)
        assert largest_difference(whole, cut) < 1e-6
        assert cut_stats.metrics() == pytest.approx(whole_stats.metrics(), rel=1e-5)


def test_dummy_packs_contribute_exactly_nothing(policy: Policy) -> None:
    (batch_part,) = make_batch_parts(1)
    packs = packs_of(batch_part)
    plain, stats = backward(policy, packs, batch_part.loss_tokens)
    padded, padded_stats = backward(policy, pad_packs(packs, len(packs) + 2), batch_part.loss_tokens)
    assert largest_difference(plain, padded) == 0
    assert padded_stats.metrics() == stats.metrics()
    nothing, _ = backward(policy, [dummy_pack()], 0)
    assert not any(grad.any() for grad in nothing.values())


def careless(inputs: LossInputs, options: object) -> LossResult:
    """A user's loss over whole sequences that knows nothing of masks."""
    totals = torch.zeros(inputs.n_samples).index_add(0, inputs.sample, inputs.logp_current - inputs.logp_behavior)
    ratio = (totals / 100).exp()[inputs.sample]
    return LossResult(-ratio * inputs.advantages, {"ratio": ratio.detach()})


@pytest.mark.parametrize("loss", ["grpo", careless])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_masked_positions_contribute_exactly_nothing(policy: Policy, poison: float, loss: str | LossFunction) -> None:
    (batch_part,) = make_batch_parts(1)
    packs = packs_of(batch_part)
    dirty = [
        pack.with_columns(
            logp_behavior=pack.logp_behavior.masked_fill(~pack.mask, poison),
            advantages=pack.advantages.masked_fill(~pack.mask, poison),
        )
        for pack in packs
    ]

    clean, stats = backward(policy, packs, batch_part.loss_tokens, loss=loss)
    spoilt, spoilt_stats = backward(policy, dirty, batch_part.loss_tokens, loss=loss)
    assert largest_difference(clean, spoilt) == 0
    assert spoilt_stats.metrics() == stats.metrics()


def test_activation_checkpointing_changes_no_gradient(policy: Policy, folder: Path) -> None:
    (batch_part,) = make_batch_parts(1)
    plain, _ = backward(policy, packs_of(batch_part), batch_part.loss_tokens)
    recomputing = Policy.load(folder, options=ModelOptions(activation_checkpointing=True))
    assert largest_difference(plain, backward(recomputing, packs_of(batch_part), batch_part.loss_tokens)[0]) < 1e-6


def test_proximal_is_the_policy_before_the_step(policy: Policy) -> None:
    packs = packs_of(make_batch_parts(1)[0])
    anchored = with_logp(policy, packs, "logp_proximal", temperature=TEMPERATURE)
    for pack in anchored:
        output = policy(pack, temperature=TEMPERATURE)
        assert pack.logp_proximal is not None and not pack.logp_proximal.requires_grad
        assert torch.equal(pack.logp_proximal, output.logp.detach())


def test_a_loss_with_a_proximal_policy(policy: Policy) -> None:
    """Anchored at the policy itself r is 1: the gradient is that of tis with the same cap."""
    (batch_part,) = make_batch_parts(1)
    padded = pad_packs(packs_of(batch_part), 5)
    with pytest.raises(ValueError, match="needs logp_proximal"):
        backward(policy, padded, batch_part.loss_tokens, loss="decoupled_ppo", options={"cap": 2})
    anchored = with_logp(policy, padded, "logp_proximal", temperature=TEMPERATURE)
    found, stats = backward(policy, anchored, batch_part.loss_tokens, loss="decoupled_ppo", options={"cap": 2})
    expected, _ = backward(policy, padded, batch_part.loss_tokens, loss="tis", options={"cap": 2})

    assert largest_difference(found, expected) < 1e-6
    assert stats.metrics()["loss/kl_proximal_k1"] == 0
    here, at_once = backward(
        policy, padded, batch_part.loss_tokens, loss="decoupled_ppo", options={"cap": 2}, first_step=True
    )
    assert largest_difference(found, here) == 0 and at_once.metrics() == stats.metrics()


def test_a_loss_with_an_entropy_gradient(policy: Policy) -> None:
    """A loss of minus the entropy against autograd through the plain logits."""
    pack = one_pack()

    def bonus(inputs: LossInputs, options: object) -> LossResult:
        return LossResult(inputs.masked(-inputs.entropy))

    loss = Loss(LossSpec("bonus", bonus, NoOptions, entropy_gradient=True), NoOptions())
    accumulate_gradients(policy, [pack], algorithm_of(loss), temperature=TEMPERATURE, global_tokens=pack.loss_tokens)
    found = gradients(policy)
    policy.zero_grad()
    logits = stock_logits(policy, pack.token_ids, position_ids=pack.position_ids[None], use_cache=False)
    entropy = torch.distributions.Categorical(logits=logits[:-1] / TEMPERATURE).entropy()
    (-entropy[pack.mask[1:]].sum() / pack.loss_tokens).backward()
    assert largest_difference(found, gradients(policy)) < 1e-6


# ---------------------------------------------------------------- sharding, world size 1


def test_sharded_equals_plain(policy: Policy, folder: Path, mesh: DeviceMesh) -> None:
    (batch_part,) = make_batch_parts(1)
    plain, stats = backward(policy, packs_of(batch_part), batch_part.loss_tokens)
    for checkpointing in (False, True):
        sharded = Policy.load(folder, mesh, options=ModelOptions(activation_checkpointing=checkpointing))
        found, found_stats = backward(sharded, packs_of(batch_part), batch_part.loss_tokens)
        assert largest_difference(plain, found) < 1e-6
        assert found_stats.metrics() == pytest.approx(stats.metrics(), rel=1e-5)


def step_between_forwards(policy: Policy) -> Tensor:
    """backward -> forward without gradients -> optimizer step -> forward."""
    pack = one_pack()
    loss = make_loss("reinforce", {})
    accumulate_gradients(policy, [pack], algorithm_of(loss), temperature=TEMPERATURE, global_tokens=pack.loss_tokens)
    with torch.no_grad():
        policy(everywhere(pack))
        optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
        optimizer.step()
        logp: Tensor = policy(everywhere(pack)).logp
        return logp


def test_trap_a_step_after_a_forward_reaches_the_embeddings(policy: Policy, folder: Path, mesh: DeviceMesh) -> None:
    expected = step_between_forwards(policy)
    sharded = Policy.load(folder, mesh)
    torch.testing.assert_close(step_between_forwards(sharded), expected, rtol=0, atol=1e-4)
    # The same with FSDP's default for the root: the test above would notice.
    trapped = Policy.load(folder, mesh)
    assert isinstance(trapped, FSDPModule)
    trapped.set_reshard_after_forward(False, recurse=False)
    assert (step_between_forwards(trapped) - expected).abs().max() > 0.01


@pytest.mark.parametrize("sharded", [False, True])
def test_bfloat16_computes_on_float32_masters(folder: Path, mesh: DeviceMesh, sharded: bool) -> None:
    (batch_part,) = make_batch_parts(1)
    policy = Policy.load(folder, mesh if sharded else None, options=ModelOptions(torch.bfloat16))
    grads, stats = backward(policy, packs_of(batch_part), batch_part.loss_tokens)
    exact, exact_stats = backward(Policy.load(folder), packs_of(batch_part), batch_part.loss_tokens)
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    assert all(grad.dtype == torch.float32 for grad in grads.values())
    for name, grad in grads.items():
        assert float(torch.nn.functional.cosine_similarity(grad.flatten(), exact[name].flatten(), dim=0)) > 0.98, name

    assert stats.metrics()["loss/entropy"] == pytest.approx(exact_stats.metrics()["loss/entropy"], rel=0.02)
    assert largest_difference(grads, exact) > 0
    inv_freq = policy.model.model.rotary_emb.inv_freq
    assert inv_freq.dtype == torch.float32
    assert torch.equal(inv_freq, Policy.load(folder).model.model.rotary_emb.inv_freq)


# ---------------------------------------------------------------- loading and export


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("tied", [True, False])
def test_export_is_the_checkpoint(
    folder: Path, untied_folder: Path, mesh: DeviceMesh, tied: bool, sharded: bool
) -> None:
    source = folder if tied else untied_folder
    policy = Policy.load(source, mesh if sharded else None)
    assert policy.tied == tied
    saved = load_file(source / "model.safetensors")
    assert ("lm_head.weight" in saved) != tied
    if tied:
        saved["lm_head.weight"] = saved["model.embed_tokens.weight"]
    exported = {name: (tensor, placement) for name, tensor, placement in policy.export()}

    assert exported.keys() == saved.keys()
    for name, (tensor, placement) in exported.items():
        assert placement == Placement(tuple(saved[name].shape), 0)
        assert tensor.dtype == torch.float32 and not tensor.requires_grad
        assert torch.equal(tensor, saved[name])
    assert ("lm_head.weight" in [name for name, _, _ in policy.export(untie=False)]) != tied
    assert exported["model.embed_tokens.weight"][1].shape == (VOCAB, 64)
    for name, whole in policy.gather(saved):
        assert torch.equal(whole, saved[name])


def test_dropout_is_off(policy: Policy, folder: Path) -> None:
    pack = one_pack()
    assert policy.training and AutoConfig.from_pretrained(folder).attention_dropout == 0.1
    first, second = (policy(everywhere(pack)).logp for _ in range(2))
    assert torch.equal(first, second)


def test_architectures_that_would_be_wrong_are_refused(policy: Policy) -> None:
    policy.model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        Policy(policy.model)
    policy.model.config.final_logit_softcapping = None
    policy.model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB))
    with pytest.raises(ValueError, match="bias"):
        Policy(policy.model)

"""Routers that are told whom to choose, and what is said of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rl.models.families import mixtures
from rl.models.packing import Pack, sequence_pack
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions
from rl.wire.columns import register, routed_experts
from tests.rl.models.tiny_families import save_family

IDS = np.random.default_rng(0).integers(3, 256, 50).tolist()
REPLAY = ModelOptions(router_replay=True)


@pytest.fixture(autouse=True)
def one_thread(own_table: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module", params=mixtures())
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(request.param, tmp_path_factory.mktemp(request.param))


def own_choices(policy: Policy, ids: list[int]) -> Tensor:
    """(T, layers, k) as the router of each position chooses, one entry later, as the column has them; 0 in a layer
    without a router."""
    shape = len(policy.decoder.layers), policy.model.config.num_experts_per_tok
    made = torch.zeros(len(ids), *shape, dtype=torch.uint8)
    made[0] = 255

    def keep(layer: int, _module: object, _args: object, output: tuple[Tensor, ...]) -> None:
        made[1:, layer] = next(each for each in output if not each.is_floating_point())  # the last token is not read

    hooks = [
        each.register_forward_hook(partial(keep, index))
        for index, layer in enumerate(policy.decoder.layers)
        for each in layer.modules()
        if type(each).__name__.lower().endswith("router")
    ]
    with torch.no_grad():
        policy(sequence_pack(ids))
    for hook in hooks:
        hook.remove()
    return made


def pack_of(routing: Tensor, *sequences: list[int]) -> Pack:
    return sequence_pack(*sequences).with_columns(routed_experts=routing)


def declare(policy: Policy) -> None:
    column = routed_experts(policy.model.config.to_dict())
    assert column is not None
    register(column)


def test_its_own_choices_told_change_nothing(folder: Path) -> None:
    policy = Policy.load(folder, options=REPLAY)
    declare(policy)
    assert policy.reads == ("routed_experts",)
    plain = policy(sequence_pack(IDS))
    told = policy(pack_of(own_choices(policy, IDS), IDS))
    torch.testing.assert_close(told.logp, plain.logp, rtol=0, atol=1e-6)
    assert plain.routing is not None and told.routing is not None
    assert torch.equal(told.routing.experts, plain.routing.experts) and not told.routing.differ.any()
    assert (told.routing.experts.sum(1) == 2 * (len(IDS) - 1)).all()


def test_other_choices_are_taken_and_gradients_are_the_router_s_own(folder: Path) -> None:
    policy = Policy.load(folder, options=REPLAY)
    declare(policy)
    own = own_choices(policy, IDS)
    other = torch.where(own == 255, own, (own + 1) % 8)
    plain = policy(sequence_pack(IDS)).logp
    found = policy(pack_of(other, IDS))
    assert found.routing is not None
    assert (found.logp - plain).abs().max() > 0.01 and (found.routing.differ > 0.5 * len(IDS)).all()

    found.logp.sum().backward()
    gradients = [each.grad for name, each in policy.named_parameters() if "gate.weight" in name or "router" in name]
    assert gradients and all(each is not None and bool(each.any()) for each in gradients)


def test_a_token_without_an_entry_is_routed_by_itself(folder: Path) -> None:
    policy = Policy.load(folder, options=REPLAY)
    declare(policy)
    nothing = torch.full_like(own_choices(policy, IDS), 255)
    plain = policy(sequence_pack(IDS)).logp
    torch.testing.assert_close(policy(pack_of(nothing, IDS)).logp, plain, rtol=0, atol=1e-6)


def test_activations_that_are_computed_again_are_routed_alike_and_counted_once(folder: Path) -> None:
    found = []
    for checkpointing in (False, True):
        options = ModelOptions(router_replay=True, activation_checkpointing=checkpointing)
        policy = Policy.load(folder, options=options)
        declare(policy)
        own = own_choices(policy, IDS)
        output = policy(pack_of(torch.where(own == 255, own, (own + 3) % 8), IDS))
        output.logp.sum().backward()
        gradients = [each.grad for _, each in policy.trainable()]
        found.append((output.routing, gradients))
    (routing, gradients), (again, others) = found
    assert routing is not None and again is not None and torch.equal(routing.experts, again.experts)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_prefix_is_computed_once_only_where_its_routing_is_equal(folder: Path) -> None:
    policy = Policy.load(folder, options=REPLAY)
    declare(policy)
    answers = [IDS[:30] + IDS[30:40], IDS[:30] + IDS[40:50]]
    routing = [own_choices(policy, each) for each in answers]

    def computed(routing: list[Tensor]) -> int:
        layout = pack_of(torch.cat(routing), *answers).laid_out().layout
        assert layout is not None
        return len(layout.tokens)

    assert computed(routing) == 30 + 9 + 9  # the last token of a sample is not read
    changed = [routing[0], routing[1].clone()]
    changed[1][30] = (changed[1][30] + 1) % 8  # of the prompt's last position, which predicted the first that differs
    assert computed(changed) == 30 + 9 + 10
    changed[1][10] = (changed[1][10] + 1) % 8
    assert computed(changed) == 30 + 9 + 39 - 9

    alone = [policy(pack_of(each, ids)).logp for each, ids in zip(changed, answers, strict=True)]
    together = policy(pack_of(torch.cat(changed), *answers)).logp
    torch.testing.assert_close(together, torch.cat(alone), rtol=0, atol=1e-5)


def test_a_dense_model_has_no_routers(tmp_path: Path) -> None:
    policy = Policy.load(save_family("qwen3", tmp_path), options=REPLAY)
    assert not policy.reads and policy(sequence_pack(IDS)).routing is None

"""Adapters: they begin as nothing, train as plain torch would, and leave the learner as part of the weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from algos.registry import make_loss
from rl.config.lora import LoraOptions, lora_options
from rl.config.schema import ConfigError, LearnerConfig, ModelConfig
from rl.learner.trainer import Optimizer
from rl.learner.update import accumulate_gradients
from rl.models.families import FAMILIES, mixtures, read_config
from rl.models.naming import in_files
from rl.models.packing import Pack, sequence_pack
from rl.models.policy import Base, Policy, check_trainable
from rl.models.protocol import ModelOptions, Placement, local
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.tiny_policies import algorithm_of, everywhere, make_batch_parts, packs_of, save_tiny
from tests.rl.models.tiny_families import VOCABULARY, save_family

pytestmark = pytest.mark.slow

RANK = 4
EVERY = LoraOptions(rank=RANK, alpha=8, targets=["q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "lm_head"])
MIXED = LoraOptions(rank=RANK, alpha=8, targets=["q_proj", "experts"])
LEARNER = LearnerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5)
STEPS = 3
TEMPERATURE = 0.7


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("untied"), tied=False)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    with process_group(tmp_path) as made:
        yield made


def load(folder: Path, options: LoraOptions | None = EVERY, mesh: Any = None, **others: Any) -> Policy:
    return Policy.load(folder, mesh, options=ModelOptions(lora=options, **others))


def some_pack() -> Pack:
    return everywhere(packs_of(make_batch_parts(1)[0], 10_000)[0])


def moved(policy: Policy, seed: int = 3) -> Policy:
    """With adapters that change the model."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            rows = local(parameter)  # of one rank: all
            rows.copy_(torch.empty(rows.shape).normal_(0, 0.3, generator=random))
    return policy


@torch.no_grad()
def merged(policy: Policy, folder: Path) -> Policy:
    """A whole model with what `policy` exports."""
    model = Policy.load(folder)
    rows = {name: rows.clone() for name, rows, _ in policy.export(untie=False)}
    for name, part, _ in model.export(untie=False):
        part.copy_(rows.pop(name))
    assert not rows
    return model


# ---------------------------------------------------------------- what it begins as, and what is trained


@pytest.mark.parametrize("sharded", [False, True])
def test_it_begins_as_the_very_model(folder: Path, mesh: DeviceMesh, sharded: bool) -> None:
    policy = load(folder, mesh=mesh if sharded else None)
    pack = some_pack()
    assert torch.equal(policy(pack).logp, Policy.load(folder)(pack).logp)
    saved = load_file(folder / "model.safetensors")
    exported = {name: rows for name, rows, _ in policy.export(untie=False)}
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)


def test_only_adapters_are_trained_in_float32_beside_a_base_of_the_forward_s_dtype(
    folder: Path, mesh: DeviceMesh
) -> None:
    policy = load(folder, mesh=mesh, dtype=torch.bfloat16)
    trainable = dict(policy.trainable())
    assert len(trainable) == 2 * (5 * 2 + 1) and all(name.endswith((".lora_A", ".lora_B")) for name in trainable)
    assert {each.dtype for each in trainable.values()} == {torch.float32}
    frozen = [each for each in policy.parameters() if not each.requires_grad]
    assert len(frozen) > 20 and {each.dtype for each in frozen} == {torch.bfloat16}

    policy(some_pack()).logp.sum().backward()
    assert all(each.grad is not None and each.grad.dtype == torch.float32 for each in trainable.values())
    assert not [each for each in frozen if each.grad is not None]


def test_a_bfloat16_base_loses_nothing_of_a_small_adapter(folder: Path, mesh: DeviceMesh) -> None:
    """Of a step that is smaller than the rounding of a weight the export still has every bit."""
    policy = load(folder, mesh=mesh, dtype=torch.bfloat16)
    before = {name: rows.float() for name, rows, _ in policy.export(untie=False)}
    with torch.no_grad():
        for name, parameter in policy.trainable():
            if name.endswith("lora_B"):
                parameter.fill_(1e-6)
    after = {name: rows.float() for name, rows, _ in policy.export(untie=False)}
    name = "model.layers.0.self_attn.q_proj.weight"
    layer = policy.model.model.layers[0].self_attn.q_proj
    expected = 2 * 1e-6 * layer.lora_A.full_tensor().sum(0).expand(64, -1)
    torch.testing.assert_close(after[name] - before[name], expected, rtol=0.05, atol=3e-8)


def test_the_seed_decides_the_first_weights(folder: Path) -> None:
    def first(seed: int) -> Tensor:
        options = EVERY.model_copy(update={"seed": seed})
        return torch.cat([each.detach().flatten() for _, each in load(folder, options).trainable()])

    assert torch.equal(first(1), first(1)) and not torch.equal(first(1), first(2))


# ---------------------------------------------------------------- against plain torch, on one rank and on two


class Adapter(nn.Module):
    """`W + scale B A`, by torch's own parametrization."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.a = nn.Parameter(a.clone())
        self.b = nn.Parameter(b.clone())

    def forward(self, weight: Tensor) -> Tensor:
        return weight + EVERY.scale * self.b @ self.a


def plain(folder: Path, start: Policy) -> dict[str, Tensor]:
    """The weights after STEPS steps on samples one by one through transformers: none of our code but the names."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.requires_grad_(False)
    layers = dict(start.model.named_modules())
    adapters = []
    for name, module in list(model.named_modules()):
        ours = layers.get(name)
        for pair in getattr(ours, "pairs", ()):
            adapters.append(Adapter(getattr(ours, pair.a).detach(), getattr(ours, pair.b).detach()))
            parametrize.register_parametrization(module, pair.weight, adapters[-1])

    trained = [parameter for each in adapters for parameter in each.parameters()]
    adamw = torch.optim.AdamW(trained, LEARNER.lr, LEARNER.betas, LEARNER.eps, weight_decay=0)
    (batch_part,) = make_batch_parts(1)
    for _ in range(STEPS):
        total = torch.zeros(())
        for pack in packs_of(batch_part, 64):
            for i in range(len(pack.members)):
                here = pack.sample == i
                ids, mask, advantages = pack.token_ids[here], pack.mask[here], pack.advantages[here]
                logits = model(ids[None], use_cache=False).logits[0, :-1] / TEMPERATURE
                logp = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]
                total = total - (logp * advantages[1:])[mask[1:]].sum()
        (total / batch_part.loss_tokens).backward()
        nn.utils.clip_grad_norm_(trained, LEARNER.max_grad_norm)
        adamw.step()
        adamw.zero_grad()

    for module in list(model.modules()):
        for name in list(getattr(module, "parametrizations", ())):
            parametrize.remove_parametrizations(module, name)
    found = model.named_parameters()
    parts = (in_files(model.config.model_type, name, each, Placement(tuple(each.shape))) for name, each in found)
    return {part.name: part.tensor for parts_of_one in parts for part in parts_of_one}


def train(policy: Policy, rank: int = 0, ranks: int = 1) -> None:
    batch_part = make_batch_parts(ranks)[rank]
    optimizer = Optimizer(policy.trainable(), LEARNER, STEPS)
    algorithm = algorithm_of(make_loss("reinforce", {}))
    for step in range(STEPS):
        accumulate_gradients(
            policy,
            packs_of(batch_part, 10_000),
            algorithm,
            temperature=TEMPERATURE,
            global_tokens=batch_part.loss_tokens,
            world_size=ranks,
        )
        optimizer.step(step)


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    options = options_of(Path(folder))
    with process_group(folder, rank, 2) as mesh:
        policy = load(Path(folder), options, mesh=mesh, activation_checkpointing=True)
        train(policy, rank, 2)
        names = [name for name, _, _ in policy.export(untie=False)]
        rows = {name: rows.clone() for name, rows, _ in policy.export(untie=False)}
        half = load(Path(folder), options, mesh=mesh, dtype=torch.bfloat16)
        train(half, rank, 2)
        found = {"rows": rows, "whole": dict(policy.gather(names)), "half": dict(half.gather(names))}
        torch.save(found, f"{folder}/rank{rank}.pt")


def options_of(folder: Path) -> LoraOptions:
    return MIXED if read_config(folder)["model_type"] == "qwen3_moe" else EVERY


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_one_rank_two_ranks_and_plain_torch_train_the_same(kind: str, folder: Path, tmp_path: Path) -> None:
    if kind == "mixture":
        folder = save_family("qwen3_moe", tmp_path)
    options = options_of(folder)
    one = load(folder, options)
    expected = plain(folder, copy.deepcopy(one))
    train(one)
    found = {name: rows for name, rows, _ in one.export(untie=False)}
    start = load_file(folder / "model.safetensors")
    ranks = results_of_ranks(rank_main, folder, 2)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-5)
        torch.testing.assert_close(torch.cat([rank["rows"][name] for rank in ranks]), tensor, rtol=0, atol=1e-5)
        torch.testing.assert_close(ranks[1]["whole"][name], tensor, rtol=0, atol=1e-5)
        adapted = bool({*name.split(".")} & {*options.targets})
        assert ((tensor - start[name]).abs().max() > 1e-3) == adapted, name

        begun = start[name].bfloat16().float()  # of bfloat16 gradients: the same way, and about as far
        moved, exact = (ranks[0]["half"][name] - begun).flatten(), (tensor - start[name]).flatten()
        least = 0.95 if kind == "dense" else 0.8  # routers that round choose otherwise for some of these few tokens
        assert not adapted or torch.nn.functional.cosine_similarity(moved, exact, dim=0) > least, name
        assert torch.equal(ranks[0]["half"][name], ranks[1]["half"][name])


# ---------------------------------------------------------------- what leaves the learner, and what it is held to


@pytest.mark.parametrize("family", FAMILIES)
def test_of_every_family_the_export_computes_what_the_learner_computes(family: str, tmp_path: Path) -> None:
    folder = save_family(family, tmp_path)
    targets: Any = ["q_proj", "o_proj", "experts"] if family in mixtures() else "all-linear"
    policy = moved(load(folder, LoraOptions(rank=RANK, alpha=2, targets=targets)))
    ids = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
    pack = sequence_pack(ids[:17], ids)
    with torch.no_grad():
        logp = policy(pack).logp
        torch.testing.assert_close(merged(policy, folder)(pack).logp, logp, rtol=0, atol=1e-4)
        assert (logp - Policy.load(folder)(pack).logp).abs().max() > 0.1


@pytest.mark.parametrize("sharded", [False, True])
def test_without_its_adapters_it_is_the_model_that_it_began_as(folder: Path, mesh: DeviceMesh, sharded: bool) -> None:
    policy = moved(load(folder, mesh=mesh if sharded else None))
    base, start, pack = Base(policy), Policy.load(folder), some_pack()
    ours = policy(pack).logp
    assert torch.equal(base(pack).logp, start(pack).logp) and not base(pack).logp.requires_grad
    assert torch.equal(policy(pack).logp, ours) and (ours - base(pack).logp).abs().max() > 0.1
    for (name, rows, _), (known, tensor, _) in zip(base.export(), start.export(), strict=True):
        assert name == known and torch.equal(rows, tensor)


@pytest.mark.parametrize("sharded", [False, True])
def test_adapters_beside_experts_begin_as_nothing_and_can_be_put_aside(
    sharded: bool, mesh: DeviceMesh, tmp_path: Path
) -> None:
    """Beside a base in bfloat16 as well, whose experts take their sums in the dtype of the forward."""
    folder = save_family("qwen3_moe", tmp_path)
    pack, start = some_pack(), Policy.load(folder)
    policy = load(folder, MIXED, mesh=mesh if sharded else None)
    assert torch.equal(policy(pack).logp, start(pack).logp)
    assert torch.equal(Base(moved(policy))(pack).logp, start(pack).logp)
    torch.testing.assert_close(merged(policy, folder)(pack).logp, policy(pack).logp, rtol=0, atol=1e-4)

    half = load(folder, MIXED, mesh=mesh if sharded else None, dtype=torch.bfloat16)
    half(pack).logp.sum().backward()
    trainable = dict(half.trainable())
    assert len(trainable) == 2 * 2 * 3 and {each.dtype for each in trainable.values()} == {torch.float32}
    assert all(each.grad is not None and each.grad.any() for name, each in trainable.items() if name.endswith("_B"))


def test_a_head_with_an_adapter_is_trained_and_merged(folder: Path) -> None:
    policy = moved(load(folder, LoraOptions(rank=RANK, alpha=8, targets=["lm_head"])))
    pack = some_pack()
    output = policy(pack, entropy_gradient=True)
    whole = merged(policy, folder)(pack)
    torch.testing.assert_close(output.logp, whole.logp, rtol=0, atol=5e-5)
    torch.testing.assert_close(output.entropy, whole.entropy, rtol=0, atol=5e-5)
    (output.logp.sum() + output.entropy.sum()).backward()
    assert all(each.grad is not None and each.grad.any() for _, each in policy.trainable())


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"targets": ["q_porj"]}, r"model.lora.targets: qwen3 has no linear layer 'q_porj'; did you mean 'q_proj'"),
        ({"targets": ["qkv_proj"]}, r"qwen3 has no linear layer 'qkv_proj'; did you mean"),
        ({"targets": ["experts"]}, r"qwen3 has no linear layer 'experts'"),
        ({"rank": 33}, r"model.lora.rank=33: model.layers.0.self_attn.k_proj has rank 32 itself; lower it"),
        ({"targets": ["lm_head"], "rank": 2}, r"the head is the embedding \(tie_word_embeddings\)"),
    ],
)
def test_what_the_model_has_not_is_refused_before_weights_are_read(
    given: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=told):
        check_trainable(folder, options=LoraOptions(**given))
    check_trainable(folder, options=LoraOptions(rank=32))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rank": 0}, r"model.lora.rank=0: .*greater than or equal to 1"),
        ({"rnak": 8}, r"unknown key 'model.lora.rnak'; did you mean 'rank'"),
        ({"dropout": 0.1}, r"model.lora.dropout=0.1: engines have none.*leave it out"),
        ({"targets": "q_proj"}, r"model.lora.targets.*'q_proj'"),
        ({"targets": []}, r"model.lora.targets=\[\]: name the layers"),
        ({"alpha": -1}, r"model.lora.alpha=-1"),
        (
            {"serve": "adapter", "rank": 513},
            r"model.lora.rank=513: engines have adapters of rank 512 at most; lower it, or",
        ),
        ({"serve": "adapter", "targets": ["experts"]}, r"model.lora.targets: experts get no .*model.lora.serve=merged"),
        (
            {"serve": "adapter", "targets": ["lm_head"]},
            r"model.lora.targets: lm_head gets no .*model.lora.serve=merged",
        ),
        ({"serve": "adapters"}, r"model.lora.serve='adapters'"),
    ],
)
def test_bad_options_are_one_line(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        lora_options(ModelConfig(lora=given))
    assert "\n" not in str(raised.value)


def test_no_dropout_may_be_said_and_nothing_is_no_adapter() -> None:
    assert lora_options(ModelConfig(lora={"dropout": 0.0, "rank": 2})) == LoraOptions(rank=2)
    assert lora_options(ModelConfig()) is None and lora_options(ModelConfig(lora={})) == LoraOptions()

"""Compiled layers and head give the numbers of plain ones, and lengths that are new compile nothing.

Most tests trace without making code (`aot_eager`): what is traced, how often, and where it breaks is the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl.config.lora import LoraOptions
from rl.models import compiled, packed_attention
from rl.models.families import FAMILIES
from rl.models.head import token_logprobs
from rl.models.packing import Pack, dummy_pack, make_packs
from rl.models.policy import Critic, PackedModel, Policy
from rl.models.protocol import ModelOptions
from rl.models.team import make_team
from rl.store.made_once import cache_folder
from rl.wire.columns import COLUMNS, ROUTED_EXPERTS, routed_experts
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.tiny_policies import group_batch_part, save_tiny
from tests.rl.models.tiny_families import SHAPES, save_family

pytestmark = pytest.mark.slow

GROUPS = [
    [(9, [3, 5, 3, 1]), (9, [3, 2]), (6, [4, 4, 4])],
    [(19, [3, 15, 3, 1]), (9, [3, 2])],
    [(12, [7, 8, 9])],
    [(40, [3, 5, 1, 1])],
    [(8, [11, 12])],
]
"""Five packs, each as (tokens of the prompt, tokens of its answers): no length is as before."""
OPTIONS = {
    "plain": ModelOptions(),
    "activations again": ModelOptions(activation_checkpointing=True),
    "adapters": ModelOptions(lora=LoraOptions(rank=4, alpha=8)),
    "bfloat16": ModelOptions(torch.bfloat16),
}


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "torchinductor"))
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(disable=False):
        yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"), tied=False)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


class Watched:
    """What was told of compiling."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        self.told.append("begins")
        yield
        self.told.append("ends")


def test_who_watches_knows_when_torch_compiles_and_when_it_does_no_more() -> None:
    watched = Watched()
    compiled.while_compiling(watched)
    double = torch.compile(lambda values: values * 2, dynamic=True, backend="aot_eager")
    leaf = torch.ones(3, requires_grad=True)
    double(leaf).sum().backward()
    told = [*watched.told]
    assert told and told == ["begins", "ends"] * (len(told) // 2)

    double(leaf).sum().backward()
    assert watched.told == told, "nothing was compiled"


def test_an_older_torch_says_no_more_than_that_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callbacks take nothing."""
    begin: list[Callable[[], None]] = []
    end: list[Callable[[], None]] = []
    older = SimpleNamespace(register_start_callback=begin.append, register_end_callback=end.append)
    monkeypatch.setattr(torch._dynamo.callback, "callback_handler", older)
    watched = Watched()
    compiled.while_compiling(watched)
    for callback in (*begin, *end):
        callback()
    assert watched.told == ["begins", "ends"]


def packs() -> list[Pack]:
    return [
        pack for seed, groups in enumerate(GROUPS) for pack in make_packs(group_batch_part(groups, seed), 10_000, 5)
    ]


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def breaks() -> int:
    return sum(counters["graph_break"].values())


def computed(model: PackedModel, pack: Pack, share: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """What the model says of a pack, and the gradient of a sum of it, times `share`."""
    model.zero_grad(set_to_none=True)
    found = model(pack)
    values: Tensor = found if isinstance(found, Tensor) else found.logp
    (values * torch.cos(pack.token_ids) * share).sum().backward()
    gradients = {name: each.grad for name, each in model.trainable()}
    return values.detach(), {name: local(grad) for name, grad in gradients.items() if grad is not None}


def local(grad: Any) -> Tensor:
    whole: Tensor = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return whole


def equal(one: PackedModel, other: PackedModel, pack: Pack, tolerance: float = 1e-5) -> None:
    """Both say the same of a pack, with gradients that are the same by the largest of them."""
    values, gradients = computed(one, pack)
    expected, plain = computed(other, pack)
    torch.testing.assert_close(values, expected, rtol=0, atol=tolerance)
    assert gradients.keys() == plain.keys() != set()
    scale = max(float(each.abs().max()) for each in plain.values())
    for name, each in plain.items():
        torch.testing.assert_close(gradients[name], each, rtol=0, atol=tolerance * max(scale, 1e-6), msg=name)


@pytest.mark.parametrize("name", ["plain", "bfloat16"])
def test_numbers_are_those_of_plain_layers_and_new_lengths_compile_nothing(folder: Path, name: str) -> None:
    options = OPTIONS[name]
    made = [Policy.load(folder, options=each) for each in (options, with_compiling(options))]
    tolerance = tolerance_of(options)

    counted = []
    for pack in packs():
        equal(made[1], made[0], pack, tolerance)
        with torch.no_grad():
            torch.testing.assert_close(made[1](pack).logp, made[0](pack).logp, rtol=0, atol=tolerance)
        counted.append(graphs())

    assert 0 < counted[-1] == counted[1]
    equal(made[1], made[0], dummy_pack(), tolerance)  # of one token
    assert graphs() <= 2 * counted[-1]


def tolerance_of(options: ModelOptions) -> float:
    return 1e-5 if options.dtype == torch.float32 else 0.1


def with_compiling(options: ModelOptions) -> ModelOptions:
    return replace(options, compile=True)


def test_it_is_refused_where_torch_compiles_nothing(folder: Path) -> None:
    with (
        torch._dynamo.config.patch(disable=True),
        pytest.raises(ValueError, match=r"learner\.compile=true, but TORCHDYNAMO_DISABLE is set"),
    ):
        Policy.load(folder, options=ModelOptions(compile=True))


def rank_main(rank: int, folder: str) -> None:
    """Of the first pack: by ranks that compute it twice and are averaged, and by a team, whose gradients add up."""
    torch.set_num_threads(1)
    compiled.BACKEND = "aot_eager"
    with process_group(folder, rank, 2) as mesh:
        results = {}
        for name, team in (("sharded", None), ("team", make_team("cpu", 2))):
            options = ModelOptions(activation_checkpointing=True, compile=True, team=team)
            policy = Policy.load(folder, mesh, options=options)
            results[name] = computed(policy, packs()[0], 1.0 if team is None else 2.0)
        torch.save(results | {"graphs": graphs()}, f"{folder}/rank{rank}.pt")


@pytest.mark.docs
def test_two_ranks_and_a_team(tmp_path: Path) -> None:
    expected, gradients = computed(Policy.load(save_tiny(tmp_path, tied=False)), packs()[0])
    for told in results_of_ranks(rank_main, tmp_path, 2):
        assert told["graphs"] > 0
        for values, found in (told["sharded"], told["team"]):
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
            scale = max(float(each.abs().max()) for each in gradients.values())
            for name, each in gradients.items():
                torch.testing.assert_close(found[name], each, rtol=0, atol=1e-5 * scale, msg=name)


@pytest.mark.docs
def test_a_critic(folder: Path) -> None:
    plain, made = (Critic.load(folder, options=ModelOptions(compile=each)) for each in (False, True))
    for model in (plain, made):
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(0))
    for pack in packs():
        equal(made, plain, pack)
    assert graphs() > 0


@pytest.mark.docs
@pytest.mark.parametrize("checkpointing", [False, True])
def test_routers_are_told_and_watched_as_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpointing: bool
) -> None:
    folder = save_family("qwen3_moe", tmp_path, vocab_size=67)
    column = routed_experts({"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2})
    assert column is not None
    monkeypatch.setitem(COLUMNS, ROUTED_EXPERTS, column)
    plain, made = (
        Policy.load(
            folder,
            options=ModelOptions(activation_checkpointing=checkpointing, router_replay=True, compile=each),
        )
        for each in (False, True)
    )

    for seed, pack in enumerate(packs()):
        random = torch.rand(pack.tokens, 2, 8, generator=torch.Generator().manual_seed(seed))
        told = pack.with_columns(**{ROUTED_EXPERTS: random.topk(2).indices.to(torch.int32)})
        equal(made, plain, told)
        found, expected = made(told).routing, plain(told).routing
        assert found is not None and expected is not None and float(expected.differ.sum()) > 0
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
    assert graphs() > 0


# ---------------------------------------------------------------- the kernel of GPUs


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function for GPUs, as it is traced there; what it computes is done here, and a CPU is not refused."""
    operations = pytest.importorskip("torch.nn.attention.varlen")
    operations._varlen_attn.register_kernel("cpu")(forward_of_segments)
    operations._varlen_attn_backward.register_kernel("cpu")(backward_of_segments)
    monkeypatch.setattr(packed_attention, "_capability", compiled.asked_once(lambda device: (9, 0)))
    monkeypatch.setattr(packed_attention, "_refused", refused_by_age)


def refused_by_age(device: torch.device, dtype: torch.dtype, head: int) -> str:
    """What is asked of a GPU, asked of a CPU."""
    return "" if packed_attention._capability(device) >= (8, 0) else "old"


def forward_of_segments(
    query: Tensor, key: Tensor, value: Tensor, query_bounds: Tensor, key_bounds: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """others: two lengths, causal, scale, window, and what is not asked for here."""
    found = torch.empty_like(query)
    for own, seen in segments(query_bounds, key_bounds):
        odds, _ = odds_of(query[own], key[seen], others[3], others[4])
        found[own] = torch.einsum("hqk,khd->qhd", odds, spread(value[seen], query))
    return found, torch.zeros(query.shape[1], len(query)), torch.zeros(2, dtype=torch.uint64)


def backward_of_segments(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: Tensor,
    lse: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_query: int,
    longest_key: int,
    causal: bool,
    state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(each) for each in (query, key, value))
    for own, seen in segments(query_bounds, key_bounds):
        odds, factor = odds_of(query[own], key[seen], scale, window_size)
        of_odds = torch.einsum("qhd,khd->hqk", grad[own], spread(value[seen], query))
        of_scores = odds * (of_odds - (odds * of_odds).sum(-1, keepdim=True)) * factor

        dq[own] = torch.einsum("hqk,khd->qhd", of_scores, spread(key[seen], query))
        dk[seen] = gathered(torch.einsum("hqk,qhd->khd", of_scores, query[own]), key)
        dv[seen] = gathered(torch.einsum("hqk,qhd->khd", odds, grad[own]), key)
    return dq, dk, dv


def segments(queries: Tensor, keys: Tensor) -> list[tuple[slice, slice]]:
    ends = [list(itertools.starmap(slice, itertools.pairwise(each.tolist()))) for each in (queries, keys)]
    return list(zip(*ends, strict=True))


def odds_of(q: Tensor, k: Tensor, scale: float | None, window: list[int] | None) -> tuple[Tensor, float]:
    """(heads, queries, keys) of one segment, whose last query sees the last key; the factor of its scores.

    window: how many keys before its own a query sees, if not all (-1).
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("qhd,khd->hqk", q, spread(k, q)) * factor
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    if window is not None and window[0] >= 0:
        seen = seen.triu(len(k) - len(q) - window[0])
    return scores.masked_fill(~seen, -torch.inf).softmax(-1), factor


def spread(each: Tensor, query: Tensor) -> Tensor:
    """Keys or values with as many heads as queries."""
    return each.repeat_interleave(query.shape[1] // each.shape[1], 1)


def gathered(each: Tensor, key: Tensor) -> Tensor:
    parted: Any = each.unflatten(1, (key.shape[1], -1))
    whole: Tensor = parted.sum(2)
    return whole


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("plain", 6),  # layers, scores and slopes; once more for what is 1 in the first pack
        pytest.param("activations again", 6, marks=pytest.mark.docs),
        pytest.param("adapters", 8, marks=pytest.mark.docs),  # below the first layer nothing is trained
        pytest.param("bfloat16", 6, marks=pytest.mark.docs),
    ],
)
def test_a_layer_is_one_graph_where_the_kernel_is_that_of_gpus(
    folder: Path, mesh: DeviceMesh, name: str, most: int
) -> None:
    options = OPTIONS[name]
    expected = Policy.load(folder, options=replace(options, attention="sdpa"))
    made = Policy.load(folder, mesh, options=with_compiling(replace(options, attention="auto")))
    counted = []
    for pack in packs():
        equal(made, expected, pack, tolerance_of(options))
        counted.append(graphs())
    assert counted[-1] == counted[1] <= most

    equal(made, expected, dummy_pack(), tolerance_of(options))
    with torch.no_grad():
        torch.testing.assert_close(made(pack).logp, expected(pack).logp, rtol=0, atol=tolerance_of(options))
    assert breaks() == 0


@pytest.mark.families
@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("family", SHAPES)
def test_every_family(tmp_path: Path, family: str) -> None:
    """Of packs longer than the windows of those that have any."""
    folder = save_family(family, tmp_path, vocab_size=67)
    expected = Policy.load(folder, options=ModelOptions(attention="sdpa"))
    made = Policy.load(folder, options=with_compiling(ModelOptions(attention="auto")))
    counted = []
    for pack in packs()[1:]:
        equal(made, expected, pack)
        counted.append(graphs())
    assert (breaks() > 0) == (FAMILIES[family].routing is not None), "experts stay as they are, and nothing else"
    assert 0 < counted[-1] == counted[1]


# ---------------------------------------------------------------- code


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_that_inductor_makes_is_the_plain_one(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, entropy_gradient: bool
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    random = torch.Generator().manual_seed(0)
    for tokens in (23, 40, 57):
        hidden, weight = (torch.randn(rows, 8, generator=random).to(dtype) for rows in (tokens, 97))
        targets = torch.randint(97, (tokens,), generator=random)

        found = []
        for compile in (False, True):
            own = [each.clone().requires_grad_() for each in (hidden, weight)]
            logp, entropy = token_logprobs(
                own[0],
                own[1],
                targets,
                temperature=0.7,
                chunk=16,
                entropy_gradient=entropy_gradient,
                compile=compile,
            )
            (logp * targets.cos() + (0.3 * entropy * targets.sin() if entropy_gradient else 0)).sum().backward()
            found.append((logp.detach(), entropy.detach(), own[0].grad, own[1].grad))

        for one, other in zip(*found, strict=True):
            assert one is not None and other is not None
            within = 1e-6 * max(1.0, float(other.abs().max())) if dtype == torch.float32 else 1e-2
            torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=5 * within)
    assert graphs() <= 4 and breaks() == 0


def test_layers_that_inductor_makes_are_the_plain_ones(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    plain, made = (Policy.load(folder, options=ModelOptions(compile=each)) for each in (False, True))
    for pack in packs()[:2]:
        equal(made, plain, pack)
    assert graphs() > 0


@pytest.mark.docs
@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_layer_starts_few_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """With casts, and gradients added to those of 12 weights, a pack of 28 layers has room for 3 000."""
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    options = with_compiling(ModelOptions(torch.bfloat16, attention="auto"))
    model = Policy.load(save_family(family, tmp_path, vocab_size=67), options=options)

    codes: list[str]
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(lambda: [computed(model, pack) for pack in packs()[:3]])
    calls = [re.findall(r"cpp_fused\w*\(|extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(", body) for body in bodies(codes)]
    assert len(calls) == 4  # of a layer and of the head, each forward and backward
    assert 30 < len([*itertools.chain(*calls)]) <= 45


def bodies(codes: list[str]) -> list[str]:
    """What is called, without what is defined before."""
    return [code[code.index("def call(") :] for code in codes]

"""Ranks that compute each pack together give the log-probabilities and the gradient of one, for every family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from algos.registry import registered
from rl.config.lora import LoraOptions
from rl.learner.update import with_logp
from rl.models.families import FAMILIES, check_team
from rl.models.packing import Pack, dummy_pack, sequence_pack
from rl.models.policy import Critic, Policy
from rl.models.protocol import ModelOptions
from rl.models.team import make_team
from rl.wire.columns import TEACHER_LOGP, register, routed_experts
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.learner.tiny_policies import backward, group_batch_part, largest_difference, packs_of, save_tiny
from tests.rl.models.tiny_families import BASE, VOCABULARY, save_family

RANKS = 2
VARIANTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # family, changes of its shape, options
    "one key-value head each": ("qwen3", {}, {}),
    "copied key-value heads": ("qwen3", {"num_key_value_heads": 1}, {}),
    "checkpointed": ("llama", {}, {"activation_checkpointing": True}),
    "adapters": ("qwen3", {}, {"lora": LoraOptions(rank=4, targets=["q_proj", "down_proj", "lm_head"])}),
    "replayed routers": ("qwen3_moe", {}, {"router_replay": True, "activation_checkpointing": True}),
}


def packs() -> list[Pack]:
    """Of an odd number of tokens, with beginnings that are shared; shorter than a team; and one without any target."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (61,), generator=random).tolist()
    forked = sequence_pack(ids[:23], ids[:40], ids[:17] + ids[40:], ids[5:20])
    return [forked.with_columns(loss_mask=forked.position_ids % 5 > 1), sequence_pack(ids[:2]), dummy_pack()]


def with_experts(pack: Pack, policy: Policy) -> Pack:
    column = routed_experts(policy.model.config.to_dict())
    if column is None or not policy.reads:
        return pack
    register(column)
    told = torch.randint(0, 8, (pack.tokens, *(2, 2)), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    return pack.with_columns(routed_experts=told)


def found_by(policy: Policy, ranks: int = 1) -> dict[str, Any]:
    """Log-probabilities, entropies and gradients of `packs`, and what the routers did."""
    told: dict[str, Any] = {"logp": [], "entropy": [], "experts": 0.0}
    for pack in packs():
        output = policy(with_experts(pack, policy), temperature=0.7, entropy_gradient=True)
        weights = torch.linspace(-1, 2, pack.tokens)
        loss = (output.logp * weights).sum() + 0.1 * output.entropy.sum() + output.logp.exp().sum() ** 2
        (loss * ranks).backward()
        told["logp"].append(output.logp.detach())
        told["entropy"].append(output.entropy.detach())
        told["experts"] += output.routing.experts if output.routing is not None else torch.zeros(1)
    told["gradients"] = {name: _whole(each.grad) for name, each in policy.trainable()}
    return told


def _whole(gradient: Any) -> Tensor:
    full: Tensor = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return full


def values_by(critic: Critic, ranks: int = 1) -> dict[str, Any]:
    (pack, *_) = packs()
    with torch.no_grad():
        critic.head.bias.fill_(0.3)
    values = critic(pack)
    ((values - 1).square().sum() * ranks).backward()
    return {"values": values.detach(), "gradients": {name: _whole(each.grad) for name, each in critic.trainable()}}


def load(folder: Path, mesh: Any = None, team: Any = None, **options: Any) -> Policy:
    torch.manual_seed(0)
    policy = Policy.load(folder, mesh, options=ModelOptions(team=team, **options))
    if options.get("lora"):
        with torch.no_grad():
            for _, each in policy.trainable():
                each.fill_(0.02)
    return policy


def learned_by(policy: Policy, part: tuple[int, int] = (0, 1), ranks: int = 1) -> dict[str, Any]:
    """Gradient and statistics of every loss, on packs that have whatever a loss may ask for."""
    register(TEACHER_LOGP)
    batch_part = group_batch_part([(9, [3, 5, 3, 1]), (9, [3, 2]), (6, [4, 4, 4])])
    made = packs_of(batch_part, 48)
    for column in ("logp_proximal", "logp_reference"):
        made = with_logp(policy, made, column, temperature=0.5)
    made = [pack.with_columns(teacher_logp=pack.logp_behavior - 0.1).laid_out(part) for pack in made]
    told = {}
    for loss in registered("loss"):
        gradients, stats = backward(policy, made, batch_part.loss_tokens, loss=loss, world_size=ranks)
        stats.all_reduce()
        told[loss] = gradients, stats.metrics()
    return told


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    with process_group(folder, rank, RANKS) as mesh:
        team = make_team("cpu", RANKS)
        assert team is not None and team.part == (rank, RANKS)
        for name in (*VARIANTS, *FAMILIES):
            _, _, options = VARIANTS.get(name, ("", {}, {}))
            results[name] = found_by(load(Path(folder) / name, mesh, team, **options), RANKS)

        together = ModelOptions(team=team)
        results["critic"] = values_by(Critic.load(Path(folder) / "llama", mesh, options=together), RANKS)
        results["losses"] = learned_by(Policy.load(Path(folder) / "tiny", mesh, options=together), team.part, RANKS)
    torch.save(results, f"{folder}/rank{rank}.pt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("team")
    for family in FAMILIES:
        save_family(family, folder / family)
    for name, (family, changes, _) in VARIANTS.items():
        save_family(family, folder / name, **changes)
    save_tiny(folder / "tiny")
    return folder


@pytest.fixture(scope="module")
def pairs(folder: Path) -> list[dict[str, Any]]:
    return results_of_ranks(rank_main, folder, RANKS)


@pytest.mark.parametrize("name", [*VARIANTS, *FAMILIES])
def test_two_ranks_of_one_sample_agree_with_one_rank(
    folder: Path, pairs: list[dict[str, Any]], name: str, own_table: None
) -> None:
    _, _, options = VARIANTS.get(name, ("", {}, {}))
    expected = found_by(load(folder / name, **options))
    assert max(float(each.abs().max()) for each in expected["gradients"].values()) > 0.1
    for each in pairs:
        for kind in ("logp", "entropy"):
            for one, other in zip(each[name][kind], expected[kind], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        for parameter, gradient in expected["gradients"].items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(
                each[name]["gradients"][parameter], gradient, rtol=0, atol=1e-5 * max(1.0, scale)
            )
    torch.testing.assert_close(pairs[0][name]["experts"] + pairs[1][name]["experts"], expected["experts"])


def test_so_do_the_values_of_a_critic(folder: Path, pairs: list[dict[str, Any]]) -> None:
    expected = values_by(Critic.load(folder / "llama"))
    for each in pairs:
        torch.testing.assert_close(each["critic"]["values"], expected["values"], rtol=0, atol=1e-5)
        for parameter, gradient in expected["gradients"].items():
            torch.testing.assert_close(each["critic"]["gradients"][parameter], gradient, rtol=1e-5, atol=1e-5)


def test_so_do_gradients_and_statistics_of_every_loss(
    folder: Path, pairs: list[dict[str, Any]], own_table: None
) -> None:
    for loss, (gradients, metrics) in learned_by(Policy.load(folder / "tiny")).items():
        for each in pairs:
            found, told = each["losses"][loss]
            scale = max(1.0, *(float(one.abs().max()) for one in gradients.values()))
            assert largest_difference(found, gradients) < 1e-5 * scale, loss
            assert {name: told[name] for name in smooth(told)} == pytest.approx(smooth(metrics), rel=1e-4, abs=1e-5)


def smooth(metrics: dict[str, float]) -> dict[str, float]:
    """Without quantiles, which step from bin to bin."""
    return {name: value for name, value in metrics.items() if "ratio_p" not in name}


@pytest.mark.parametrize("size", [2, 3, 8])
def test_each_token_is_one_rank_s_and_each_target_read_once(size: int) -> None:
    pack = packs()[0]
    whole = pack.laid_out().layout
    assert whole is not None
    cut = [whole.cut(index, size) for index in range(size)]
    computed = torch.stack([each.tokens for each in cut], 1).flatten()[: len(whole.tokens)]
    assert torch.equal(computed, whole.tokens) and whole.segments.tokens == len(whole.tokens)
    assert sorted(torch.cat([each.targets for each in cut]).tolist()) == whole.targets.tolist()
    for index, each in enumerate(cut):
        before = whole.rows[torch.isin(whole.targets, each.targets)]
        assert torch.equal(each.rows * size + index, before)
        assert len(each.counted) == (0 if index else len(whole.generated))
    assert max(len(each.targets) for each in cut) < 2 * len(whole.targets) / size + 4


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({}, 8, "8 ranks cannot share its 4 heads evenly"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "6 ranks cannot share its 4 key-value heads, nor"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 2, "positions are of the kind dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, 2, "positions are of the kind longrope"),
    ],
)
def test_what_ranks_cannot_share_is_said(changes: dict[str, Any], ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_team(BASE | {"model_type": "llama"} | changes, ranks)


def test_what_they_can_is_not_refused() -> None:
    check_team(BASE | {"num_attention_heads": 32, "num_key_value_heads": 4, "rope_scaling": {"type": "linear"}}, 16)


def test_a_load_refuses_as_well(folder: Path) -> None:
    class Three:
        size = 3

    with pytest.raises(ValueError, match="3 ranks cannot share its 4 heads"):
        Policy.load(folder / "llama", options=ModelOptions(team=Three()))  # type: ignore[arg-type]

"""Memory is added up before anything starts: what fits which GPUs and host, and what is refused with its number."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from launch.gpus import Gpu
from launch.machine import Machine
from launch.memory import check_context, check_memory, estimate
from rl.config.schema import ConfigError, load_config
from rl.models.shape import ModelShape

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GIB = 1 << 30

SEVEN_B = {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
}
FOUR_B = {
    "hidden_size": 2560,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
THIRTY_TWO_B = FOUR_B | {
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "intermediate_size": 25600,
    "tie_word_embeddings": False,
}
THIRTY_B_A3B = FOUR_B | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "tie_word_embeddings": False,
}
EIGHT_B = FOUR_B | {"hidden_size": 4096, "intermediate_size": 12288, "tie_word_embeddings": False}
LLAMA_8B = EIGHT_B | {
    "num_hidden_layers": 32,
    "vocab_size": 128256,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
}


def machine(host: int, gpu: int) -> Machine:
    return Machine([Gpu(str(number), gpu * GIB) for number in range(8)], host * GIB, name="this machine")


def test_parameters_are_those_of_the_published_models() -> None:
    # 7.62e9, 8.19e9, 30.5e9 and 4.02e9 are the figures on the models' pages.
    # On a CPU engines give the 4B model a head of its own.
    assert ModelShape.of(SEVEN_B).trained == ModelShape.of(SEVEN_B).served == pytest.approx(7.62e9, rel=0.01)
    assert ModelShape.of(EIGHT_B).trained == pytest.approx(8.19e9, rel=0.01)
    assert ModelShape.of(THIRTY_B_A3B).trained == pytest.approx(30.5e9, rel=0.01)
    assert ModelShape.of(FOUR_B).trained == pytest.approx(4.02e9, rel=0.01)
    assert ModelShape.of(FOUR_B).served == pytest.approx(4.02e9 + 2560 * 151936, rel=0.01)


def test_a_tied_head_takes_room_where_engines_have_one_of_their_own() -> None:
    config = load_config(EXPERIMENTS / "math_8gpu.yaml")
    model = ModelShape.of(FOUR_B)
    slots = {}
    for device in ("cpu", "cuda"):
        (slots[device],) = (need.each for need in estimate(config, device, model) if need.what == "weight slot")
    assert slots["cpu"] - slots["cuda"] == 2 * 2560 * 151936


@pytest.mark.parametrize(
    ("recipe", "told"),
    [
        ("alfworld", SEVEN_B),
        ("math", FOUR_B),
        ("swe", EIGHT_B),
        ("math_32b_lora", THIRTY_TWO_B),
        ("math_30b_a3b", THIRTY_B_A3B),
        ("swe_32k", LLAMA_8B),
    ],
)
def test_the_recipes_for_eight_gpus_fit(recipe: str, told: dict[str, int]) -> None:
    config = load_config(EXPERIMENTS / f"{recipe}_8gpu.yaml")
    model = ModelShape.of(told)
    check_context(config, "cuda", model)
    needs = estimate(config, "cuda", model)
    check_memory(needs, machine(host=1000 if recipe == "math_30b_a3b" else 512, gpu=80))

    with pytest.raises(ConfigError, match="learner's GPU"):
        check_memory([need for need in needs if need.what == "learner's GPU"], machine(host=512, gpu=24))
    with pytest.raises(ConfigError, match=r"needs about .* GiB of memory and this machine has 16.0 GiB"):
        check_memory(needs, machine(host=16, gpu=80))


def test_a_rank_may_have_more_experts_than_others() -> None:
    """Of 128 six of seven ranks have 19: FSDP divides by whole ones. With all states that is more than a GPU has."""
    options = ["learner.optimizer_states=device", "model.path=anything"]
    config = load_config(EXPERIMENTS / "math_30b_a3b_8gpu.yaml", options)
    model = ModelShape.of(THIRTY_B_A3B)
    (learner,) = (need for need in estimate(config, "cuda", model) if need.what == "learner's GPU")
    experts = 48 * model.experts
    assert learner.parts["optimizer"] == pytest.approx(
        8 * ((model.trained - experts) / 7 + experts * 19 / 128), rel=1e-6
    )
    with pytest.raises(
        ConfigError, match=r"7 × learner's GPU: 79.4 GiB each.* see learner.ranks, learner.optimizer_states"
    ):
        check_memory([learner], machine(host=512, gpu=79))


def test_what_is_trained_whole_does_not_fit_where_adapters_do() -> None:
    config = load_config(EXPERIMENTS / "math_32b_lora_8gpu.yaml", ["model.lora=null"])
    with pytest.raises(ConfigError, match=r"learner.ranks: 4 × learner's GPU: 1\d\d\.. GiB each"):
        check_memory(estimate(config, "cuda", ModelShape.of(THIRTY_TWO_B)), machine(host=1024, gpu=80))


def on_learner(model: dict[str, int], *overrides: str) -> dict[str, int]:
    """What a learner's GPU of the recipe for long samples holds."""
    needs = estimate(load_config(EXPERIMENTS / "swe_32k_8gpu.yaml", list(overrides)), "cuda", ModelShape.of(model))
    (need,) = [need for need in needs if need.what == "learner's GPU"]
    return need.parts


def test_ranks_that_compute_together_share_a_samples_activations_and_nothing_else() -> None:
    together = on_learner(LLAMA_8B)
    alone = on_learner(LLAMA_8B, "learner.context_parallel=1")
    assert together["activations"] * 4 == alone["activations"]
    assert together["working space"] < alone["working space"] / 1.5
    same = ("weights", "gradients", "optimizer", "gathered", "CUDA")
    assert [together[name] for name in same] == [alone[name] for name in same]


def test_a_critic_has_no_head_over_the_vocabulary() -> None:
    critic = ["algo.loss=ppo", "algo.advantage=gae", "algo.critic={lr: 1e-6}"]
    for model, head in ((SEVEN_B, 152064 * 3584), (SEVEN_B | {"tie_word_embeddings": 1}, 0)):
        alone, both = on_learner(model), on_learner(model, *critic)
        ranks = load_config(EXPERIMENTS / "swe_32k_8gpu.yaml").learner.ranks
        assert both["weights"] == pytest.approx(2 * alone["weights"] - 4 * head / ranks, abs=ranks)
        assert both["optimizer"] == pytest.approx(2 * alone["optimizer"] - 8 * head / ranks, abs=ranks)


def test_a_rank_that_is_alone_has_copies_of_what_it_casts() -> None:
    """Without recomputation all of them until the backward; none of what is in the dtype of the forward already."""
    alone = ["learner.ranks=1", "learner.context_parallel=1"]
    again, kept = ([*alone, f"learner.activation_checkpointing={each}"] for each in ("true", "false"))
    adapters, critic = (
        "model.lora={rank: 8, alpha: 16}",
        ["algo.loss=ppo", "algo.advantage=gae", "algo.critic={lr: 1e-6}"],
    )
    whole = on_learner(FOUR_B, *kept)["gathered"]
    assert (
        whole == on_learner(FOUR_B, *kept)["weights"] // 2 == on_learner(FOUR_B, *kept, adapters, *critic)["gathered"]
    )
    assert 0 < on_learner(FOUR_B, *again)["gathered"] < whole / 2

    for none in ([adapters], ["learner.optimizer_states=host"]):
        assert on_learner(FOUR_B, *kept, *none)["gathered"] == 0
    compared = on_learner(FOUR_B, *kept, adapters, "algo.kl={coef: 0.1, reference: other}")["gathered"]
    assert compared == on_learner(FOUR_B, *again)["gathered"]


def test_what_is_too_long_for_a_rank_is_refused_with_the_number_and_fits_several() -> None:
    long = ["generator.max_model_len=131072"]
    model = ModelShape.of(LLAMA_8B)
    check_memory(estimate(load_config(EXPERIMENTS / "swe_32k_8gpu.yaml", long), "cuda", model), machine(1024, 80))
    alone = load_config(EXPERIMENTS / "swe_32k_8gpu.yaml", [*long, "learner.context_parallel=1"])
    with pytest.raises(ConfigError, match=r"^learner.context_parallel: 4 × learner's GPU: 109.\d GiB each.*80.0 GiB"):
        check_memory(estimate(alone, "cuda", model), machine(1024, 80))


def test_of_two_copies_each_is_divided_among_half_of_the_ranks() -> None:
    one, two = on_learner(FOUR_B), on_learner(FOUR_B, "learner.copies=2")
    assert all(two[name] == 2 * one[name] for name in ("weights", "gradients", "optimizer"))
    assert on_learner(FOUR_B, "learner.reduce_dtype=bfloat16")["working space"] <= one["working space"]


def test_a_checkpoint_in_the_background_needs_a_copy_on_the_host() -> None:
    def held(how: str) -> int:
        config = load_config(EXPERIMENTS / "swe_32k_8gpu.yaml", [f"learner.checkpoints={how}"])
        needs = estimate(config, "cuda", ModelShape.of(LLAMA_8B))
        return next(need.each for need in needs if need.what == "learner rank")

    assert held("background") - held("blocking") == pytest.approx(3 * 4 * 8.03e9 / 4, rel=0.01)


def test_an_engine_has_no_more_of_its_gpu_than_it_may_take() -> None:
    overrides = ["generator.options.gpu_memory_utilization=0.15"]
    config = load_config(EXPERIMENTS / "alfworld_8gpu.yaml", overrides)
    needs = estimate(config, "cuda", ModelShape.of(SEVEN_B))
    with pytest.raises(ConfigError, match=r"engine's GPU.* has 80.0 GiB, of which .*utilization leaves 0.15"):
        check_memory(needs, machine(host=512, gpu=80))


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("generator.max_model_len=100000", "reads at most 32768"),
        ("generator.options.kv_cache_bytes=1", "generator.options.kv_cache_bytes=1"),
        ("generator.tensor_parallel=3", "generator.tensor_parallel=3"),
        ("generator.options.expert_parallel=true", "a layer's 0 experts"),
    ],
)
def test_engine_and_model_must_agree(override: str, told: str) -> None:
    config = load_config(EXPERIMENTS / "alfworld_8gpu.yaml", [override])
    with pytest.raises(ConfigError, match=told):
        check_context(config, "cuda", ModelShape.of(SEVEN_B))


@pytest.mark.parametrize(
    ("device", "blocks", "ranks"),
    [("cpu", 32 * 33, 1), ("cuda", 16 * 65, 1), ("cuda", 16 * 65, 4), ("cuda", 32 * 65, 8)],
)
def test_a_cache_has_a_block_more_than_a_context(device: str, blocks: int, ranks: int) -> None:
    """One stays empty: vLLM refuses a cache of one context alone, when the run has begun. Of four heads each of eight
    ranks has one."""
    token = 2 * 28 * 4 * 128 * 2
    sizes = {"generator.max_model_len": 1024, "sampling.max_tokens": 512, "generator.tensor_parallel": ranks}
    for cache, fits in ((blocks * token, True), (blocks * token - 1, False)):
        overrides = [f"{name}={size}" for name, size in (sizes | {"generator.options.kv_cache_bytes": cache}).items()]
        config = load_config(EXPERIMENTS / "alfworld_8gpu.yaml", overrides)
        with nullcontext() if fits else pytest.raises(ConfigError, match=f"takes {blocks * token}, with the block"):
            check_context(config, device, ModelShape.of(SEVEN_B))

"""Bad configuration is one line that names the field, the value and the fix, before any process starts."""

from __future__ import annotations

import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from pydantic import BaseModel
from transformers import DeepseekV3Config, Gemma2Config, GPT2Config, PreTrainedConfig

from launch import preflight
from launch.cli import main
from launch.gpus import Gpu, visible_gpus
from launch.machine import Machine
from launch.memory import check_context, check_memory, estimate
from launch.plan import gpus_needed, make_plan
from launch.preflight import check, make_run
from launch.prepare import Prepared, check_model_is_trainable, needs_validation, validate
from rl.config.schema import Config, ConfigError, load_config
from rl.config.section import NoOptions
from rl.models.shape import ModelShape
from rl.store.checkpoint_folder import Meta, begin, commit
from rollout.broker.core import BrokerCore
from rollout.broker.groups import Groups
from rollout.broker.hooks import BrokerHook
from rollout.broker.rules import Rules
from rollout.broker.tasks import Oldest, ShuffledTasks
from rollout.episodes.hooks import EpisodeHook

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
GIB = 1 << 30


class Unkept(Oldest):
    def __init__(self) -> None:
        self.order = lambda version: version


class Snapshot(ShuffledTasks):
    """As curricula were before."""

    state = None  # type: ignore[assignment]

    def snapshot(self) -> int:
        return self.cursor


class Opaque(ShuffledTasks):
    def state(self) -> Any:
        return random.Random(self.cursor)


class Forgetful(ShuffledTasks):
    def restore(self, state: int) -> None:
        """Begins anew."""


class Tuples(ShuffledTasks):
    def state(self) -> Any:
        return (self.cursor, self.tasks)

    def restore(self, state: Any) -> None:
        if not isinstance(state, tuple):
            raise ValueError("not from a list")


class UnkeptHook(BrokerHook):
    def __init__(self, options: NoOptions, groups: Groups) -> None:
        super().__init__(options, groups)
        self.wanted = lambda server: server > 0


class Unmade(EpisodeHook):
    def __init__(self, *parts: object) -> None:
        raise ValueError("it never can")


@pytest.fixture(autouse=True)
def prepared_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child of the preflight checks, in this process: a child for each case would import torch each time."""

    def prepare(config: Config, *, make: bool, begin: object) -> Prepared:
        if needs_validation(config):
            validate(config)
        return Prepared(None, 0)

    monkeypatch.setattr(preflight, "prepare", prepare)


BAD = [
    # (recipe, overrides, what the line must say)
    ("simulated", "steps=true", "steps=True"),
    ("simulated", "rollout.alpha=true", "rollout.alpha=True"),
    ("simulated", "env.options.turns=true", "env.options.turns=True"),
    ("simulated", "rollout.alpha=.inf", "rollout.alpha=inf"),
    (
        "math_cpu",
        "generator.options.own_process=false generator.tensor_parallel=2",
        "generator.options.own_process=false",
    ),
    ("simulated", "learner.lr=.nan", "learner.lr=nan"),
    ("simulated", "learner.eps=.inf", "learner.eps=inf"),
    ("simulated", "learner.betas=[2,3]", "learner.betas.0=2"),
    ("simulated", "learner.betas=[0.9]", "learner.betas"),
    ("simulated", "timeouts.heartbeat_s=100", "timeouts.heartbeat_s=100"),
    ("simulated", "timeouts.heartbeat_s=59", "timeouts.heartbeat_s=59"),
    ("simulated", "rollout.priority=nope", "freshest, oldest"),
    ("simulated", "rollout.priority=os:path", "no method 'issue'"),
    ("simulated", "rollout.priority=tests.launch.test_bad_configuration:Unkept", "the broker's log cannot keep"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Snapshot", "no method 'state'"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Opaque", "the broker's log cannot keep"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Forgetful", "makes it another one"),
    ("simulated", "rollout.curriculum=tests.launch.test_bad_configuration:Tuples", "ValueError: not from a list"),
    ("simulated", "rollout.hooks=[hedgin]", "did you mean 'hedging'"),
    ("simulated", "rollout.hooks=[no.such:Hook]", "rollout.hooks='no.such:Hook' cannot be imported"),
    ("simulated", "rollout.hooks=[os:path]", "rollout.hooks='os:path' is no hook"),
    ("simulated", "rollout.hooks=hedging", "rollout.hooks='hedging': Input should be a valid list"),
    ("simulated", "rollout.hooks=[hedging,hedging]", "named twice"),
    ("simulated", 'rollout.hooks=[{"hedging":0.9}]', "write the plug-in's name, or {name: {option: value}}"),
    ("simulated", 'rollout.hooks=[{"hedging":{"quantile":2}}]', "rollout.hooks.hedging.quantile=2"),
    ("simulated", 'rollout.hooks=[{"hedging":{"quantil":0.5}}]', "did you mean 'quantile'"),
    (
        "simulated",
        'rollout.hooks=[{"turn_barrier":{"x":1}}]',
        "'rollout.hooks.turn_barrier.x'; there are none here",
    ),
    ("simulated", "rollout.hooks=[tests.launch.test_bad_configuration:UnkeptHook]", "the broker's log cannot keep"),
    ("simulated", "rollout.hooks=[tests.launch.test_bad_configuration:Unmade]", "cannot be made: it never can"),
    ("simulated", "rollout.turn_barrier=true", "write rollout.hooks=[turn_barrier]"),
    ("simulated", "rollout.hedge_quantile=0.9", "write rollout.hooks=[{hedging: {quantile: 0.95}}]"),
    ("simulated", "rollout.surplus=keep", "rollout.surplus was removed"),
    ("simulated", "chat.parser=vllm:nope", "no tool parser 'nope'"),
    ("agent_tools_cpu", "chat.parser=vllm:hermes+nope", "no reasoning parser 'nope'"),
    ("agent_tools_cpu", "chat.parser=vllm:+", "no parser is named"),
    ("simulated", "rollout.curriculum=nope", "shuffled, success"),
    ("simulated", "rollout.curriculum=os:path", "no method 'next'"),
    ("simulated", 'rollout.curriculum={"shuffled":{"a":1}}', "rollout.curriculum='shuffled'"),
    ("simulated", "generator.count=100000", "lower generator.count"),
    ("simulated", "env.servers=100000", "lower env.servers"),
    ("simulated", "learner.ranks=100000", "lower learner.ranks"),
    ("math_lora_cpu", 'model.lora={"serve":"adapter","targets":["lm_head"]}', "set model.lora.serve=merged"),
    ("simulated", "weights.slots=1000000", "lower weights.slots"),
    ("simulated", "weights.transport=shn", "did you mean 'shm'?"),
    ("simulated", "weights.transport=nccl", "goes from GPU to GPU, and device=cpu; set weights.transport=auto"),
    ("simulated", "weights.transport=ipc", "goes from GPU to GPU, and device=cpu; set weights.transport=auto"),
    ("simulated", "weights.transport=os:path", "names no rl.weights.channel.Channel"),
    ("simulated", "rollout.group_size=1000000000", "rollout.group_size"),
    ("simulated", "rollout.alpha=1e12", "lower rollout.alpha"),
    ("simulated", "model.path=/nonexistent", "model.path='/nonexistent'"),
    ("simulated", "model.path=../nonexistent", "model.path='../nonexistent'"),
    ("simulated", "rollout.groups_per_batch=1000000000", "rollout.groups_per_batch"),
    ("simulated", "learner.options.weight_bytes=1000000000000000", "weights.slots"),
    ("simulated", "steps=1e30", "steps="),
    ("simulated", "seed=-1", "seed=-1"),
    ("simulated", "seed=1e30", "seed="),
    ("simulated", "name=", "name=''"),
    ("simulated", "name=..", "name='..'"),
    ("simulated", "name=" + 300 * "x", "at most 200 bytes"),
    ("simulated", "name=a\x01b", "printable"),
    ("simulated", "runs=README.md", "runs='README.md'"),
    ("simulated", "resume=README.md", "resume='README.md'"),
    ("simulated", "resume=/nonexistent", "resume='/nonexistent'"),
    ("simulated", "rollout=5", "rollout=5"),
    ("simulated", "rollout..alpha=1", "'rollout..alpha'"),
    ("simulated", "=3", "key=value"),
    ("simulated", "env.name=os:path", "env.name='os:path'"),
    ("simulated", "network.transport=tcp network.host=no.such.host.invalid", "network.host='no.such.host.invalid'"),
    ("simulated", "algo.columns=[nope]", "algo.columns='nope'"),
    ("simulated", "algo.columns=[os:path]", "algo.columns='os:path'"),
    ("math_cpu", "algo.loss=os:path", "is no loss"),
    ("simulated", "algo.loss=os:path", "is no loss"),
    ("simulated", "algo.loss=grpoo", "algo.loss"),
    ("math_cpu", "algo.advantage=os:path", "is no advantage"),
    ("math_cpu", 'algo.shaping=["os:path"]', "is no shaping"),
    ("math_cpu", "algo.options.clip_high=true", "'clip_high'"),
    ("math_cpu", "algo.options.clip_high=.nan", "'clip_high'"),
    ("math_cpu", "model.tiny.nope=1", "model.tiny.nope=1"),
    ("math_cpu", "model.tiny.layers=0", "model.tiny.layers=0"),
    ("math_cpu", "model.path=/nonexistent", "model.path='/nonexistent'"),
    ("simulated", "learner.kind=fsdp model.warm_start.demonstrations=5", "has no demonstrator"),
    ("math_cpu", "generator.options.max_num_batched_tokens=1", "generator.options.max_num_batched_tokens=1"),
    ("math_cpu", "generator.options.max_num_batched_tokens=-5", "generator.options.max_num_batched_tokens=-5"),
    ("math_cpu", "generator.threads=100000", "generator.threads=100000"),
    ("math_cpu", "learner.threads=100000", "learner.threads=100000"),
    ("math_cpu", "learner.ranks=5000", "lower learner.ranks"),
    ("math_cpu", "sampling.temperature=1e-30", "sampling.temperature"),
    ("math_cpu", "eval.tasks=1000000000", "eval.tasks=1000000000"),
]


@pytest.mark.parametrize(("recipe", "overrides", "told"), BAD, ids=[f"{recipe} {each}" for recipe, each, _ in BAD])
def test_it_is_one_line_and_starts_nothing(
    recipe: str, overrides: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(*arguments: object, **options: object) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", started)
    with pytest.raises(ConfigError) as caught:
        check(load_config(EXPERIMENTS / f"{recipe}.yaml", [f"runs={tmp_path}", *overrides.split()]), dry=False)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def numbers(section: type[BaseModel], path: str = "") -> Iterator[tuple[str, set[Any]]]:
    """Every number of the configuration, and of which types it may be."""
    for name, field in section.model_fields.items():
        kinds = {field.annotation, *get_args(field.annotation)}
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from numbers(field.annotation, f"{path}{name}.")
        elif kinds & {int, float}:
            yield path + name, kinds


@pytest.mark.parametrize(("path", "kinds"), [pytest.param(*each, id=each[0]) for each in numbers(Config)])
def test_a_number_that_nothing_could_carry_or_wait_for_is_refused(path: str, kinds: set[Any]) -> None:
    """Found late: an integer that no message can carry, seconds that overflow a clock."""
    for absurd in (10**24, -(10**24)) if int in kinds else (1e300, -1e300):
        with pytest.raises(ConfigError) as caught:
            load_config(EXPERIMENTS / "simulated.yaml", [f"{path}={absurd}"])
        assert str(caught.value).startswith(f"{path}=") and "\n" not in str(caught.value)


def test_the_command_says_it_and_returns_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", str(EXPERIMENTS / "simulated.yaml"), f"runs={tmp_path}", "steps=true"]) == 2
    assert capsys.readouterr().err == "fresco: steps=True: a number is wanted here, not true or false\n"
    assert not list(tmp_path.iterdir())


def test_a_link_in_the_place_of_a_runs_folder_is_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "linked").symlink_to(elsewhere)
    (tmp_path / "file").touch()
    for name in ("linked", "file"):
        with pytest.raises(ConfigError, match=f"name='{name}'"):
            check(load_config(EXPERIMENTS / "simulated.yaml", [f"runs={tmp_path}", f"name={name}"]), dry=False)
    assert not list(elsewhere.iterdir())


def folder(path: Path) -> None:
    path.mkdir()


def binary(path: Path) -> None:
    path.write_bytes(b"\xff\xfe\x00")


def circle(path: Path) -> None:
    path.write_text(f"base: {path.name}\n")


def wrong_base(path: Path) -> None:
    path.write_text("base: [a, b]\n")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("rollout.group_size=9", "rollout.group_size=9: its groups have 4; set it as it was"),
        ("rollout.redundant_episodes=1", "rollout.redundant_episodes=1: its groups have 0; set it as it was"),
        ("rollout.curriculum=success", "another rollout.curriculum than success"),
    ],
)
def test_a_checkpoint_that_the_broker_cannot_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str, told: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # of sockets, which no supervisor removes here
    recipe = EXPERIMENTS / "simulated.yaml"
    state = BrokerCore(Rules.of(load_config(recipe, []), train_tasks=1000)).snapshot()
    begin(tmp_path, 0)
    checkpoint = commit(tmp_path, Meta(0, 0, 2), msgspec.msgpack.encode(state), keep=1)

    resumed = [f"runs={tmp_path / 'runs'}", f"resume={checkpoint}"]
    make_run(check(load_config(recipe, [*resumed, "name=fits"]), dry=False), started=0.0)
    with pytest.raises(ConfigError) as caught:
        make_run(check(load_config(recipe, [*resumed, change]), dry=False), started=0.0)
    assert str(caught.value).startswith(f"resume='{checkpoint}': ") and str(caught.value).endswith(told)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["fits"]


@pytest.mark.parametrize("make", [folder, binary, circle, wrong_base])
def test_a_recipe_that_is_none(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "recipe.yaml"
    make(path)
    with pytest.raises(ConfigError, match=str(path)):
        load_config(path)


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


@pytest.mark.parametrize(
    ("channel", "settings", "gpus", "told"),
    [
        ("nccl", [], 1, "NCCL refuses an engine and a learner on one GPU; set weights.transport=auto"),
        ("nccl", ["placement=shared"], 2, "NCCL refuses an engine and a learner on one GPU"),
        ("nccl", ["placement=alternate"], 2, "NCCL refuses an engine and a learner on one GPU"),
        (
            "ipc",
            ["placement=alternate"],
            2,
            "its blocks stay on the GPU in the engine's turn; set weights.transport=auto",
        ),
        ("nccl", ["steps=0"], 2, "steps=0 leaves a learner none"),
        ("nccl", ["placement=apart", "network.transport=tcp"], 2, "meet at a file, and network.transport=tcp has none"),
        ("nccl", ["placement=apart"], 2, ""),
        (
            "ipc",
            [],
            2,
            "placement=auto gives .* one each; set placement=shared, or weights.transport=auto",
        ),
        ("ipc", ["placement=apart"], 1, "placement=apart gives engine and learner one each"),
        (
            "ipc",
            ["placement=shared", "generator.count=2"],
            2,
            r"not generator\.count=2, .*; set weights\.trans",
        ),
        ("ipc", ["placement=shared", "generator.tensor_parallel=2"], 2, r"not .* generator\.tensor_parallel=2"),
        ("ipc", ["placement=shared", "learner.ranks=2"], 2, r"not .* learner\.ranks=2"),
        ("ipc", ["network.transport=tcp"], 1, "meet at a file, and network.transport=tcp has none"),
        ("ipc", [], 1, ""),
        ("ipc", ["placement=shared"], 2, ""),
    ],
)
def test_channels_between_devices_are_refused_where_they_cannot_work(
    channel: str, settings: list[str], gpus: int, told: str
) -> None:
    one_each = "generator.count=1", "learner.ranks=1"
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [f"weights.transport={channel}", *one_each, *settings])
    with pytest.raises(ConfigError, match=f"weights.transport='{channel}': .*{told}") if told else nullcontext():
        preflight._check_channel(config, "cuda", gpus)


@pytest.mark.parametrize(
    ("settings", "channel"),
    [([], "shm"), (["network.transport=tcp"], "tcp"), (["network.transport=tcp", "weights.transport=shm"], "shm")],
)
def test_the_channel_follows_the_network_unless_it_is_named(settings: list[str], channel: str) -> None:
    assert load_config(None, settings).channel == channel


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


@pytest.mark.parametrize(
    ("architecture", "told"),
    [
        (GPT2Config(n_layer=1, n_embd=16, n_head=2), "has no `layers`"),
        (Gemma2Config(num_hidden_layers=1, hidden_size=16), "final_logit_softcapping"),
        (DeepseekV3Config(num_hidden_layers=1, hidden_size=16), "latent attention"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_a_model_that_cannot_be_trained(architecture: PreTrainedConfig, told: str, tmp_path: Path) -> None:
    architecture.save_pretrained(tmp_path)
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [f"model.path={tmp_path}"])
    with pytest.raises(ConfigError, match=told) as caught:
        check_model_is_trainable(config, tmp_path)
    assert str(caught.value).startswith(f"model.path={str(tmp_path)!r} cannot be trained")


def listed(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
    rows = [f"{number}, GPU-{number}aaaa-bbbb, 81559, 00000000:F{number}:00.0" for number in range(4)]
    return subprocess.CompletedProcess(command, 0, "\n".join(rows) + "\n", "")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", listed)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["0", "1", "2", "3"]),
        ("2,3", ["2", "3"]),
        ("3, 1", ["3", "1"]),
        ("GPU-2aaaa", ["GPU-2aaaa"]),
        ("", []),
        ("-1", []),
    ],
)
def test_the_users_gpus_are_taken_and_no_others(
    chosen: str | None, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert [gpu.name for gpu in visible_gpus()] == names

    config = load_config(EXPERIMENTS / "math_cpu.yaml", ["device=cuda", "generator.count=1", "learner.ranks=1"])
    if len(names) >= gpus_needed(config):
        plan = make_plan(config, "cuda", visible_gpus())
        taken = {spec.role: spec.environment["CUDA_VISIBLE_DEVICES"] for spec in plan if spec.gpus}
        assert taken == {"generator": names[0], "learner": names[1]}


@pytest.mark.usefixtures("four_gpus")
def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,7")
    with pytest.raises(ConfigError, match="'7'"):
        visible_gpus()


@pytest.mark.usefixtures("four_gpus")
def test_a_driver_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(command: list[str], timeout: float, **_: object) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", silent)
    with pytest.raises(ConfigError, match=r"nvidia-smi has not answered for 60 s: .* nvidia-smi -pm 1"):
        visible_gpus()


def test_an_evaluation_leaves_the_gpus_to_the_engines() -> None:
    config = load_config(EXPERIMENTS / "math_8gpu.yaml", ["steps=0"])
    assert gpus_needed(config) == 5
    five = [Gpu(str(number), 80 * GIB) for number in range(5)]
    learners = [spec for spec in make_plan(config, "cuda", five) if spec.role == "learner"]
    assert learners and not any(spec.gpus for spec in learners)
    assert all(spec.environment["CUDA_VISIBLE_DEVICES"] == "" for spec in learners)


def test_tokens_that_read_old_keys_and_values_cannot_be_compared_exactly() -> None:
    with pytest.raises(ConfigError, match=r"alarms.exact=0.0001: generator.on_update=keep .*on_update=recompute"):
        load_config(None, ["alarms.exact=1e-4", "generator.on_update=keep"])

"""A model is judged before anything is fetched, played or made of it, and loading takes no memory of its own."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from experiments.gateway.tokenizers import make_folder
from launch import preflight, prepare
from launch.cli import parse
from launch.commands.evaluate import configure
from launch.gpus import Gpu
from launch.machine import Machine, gpu_bytes
from launch.memory import Need, check_memory, estimate
from launch.warm_start import imitation
from rl.config.lora import LoraOptions
from rl.config.schema import ConfigError, load_config
from rl.models import foreign
from rl.models.shape import ModelShape
from rl.store.checkpoint_folder import Meta, begin, commit
from rl.store.digests import digest_of
from tests.rl.models.tiny_families import save_family

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
THIRTY_TWO_B = {
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 64,
    "vocab_size": 151936,
    "intermediate_size": 25600,
}
LEAKS = "lfm2: its layers carry a state along a pack"


@pytest.fixture
def leaking(tmp_path: Path) -> Path:
    AutoConfig.for_model("lfm2").save_pretrained(tmp_path / "leaking")
    return tmp_path / "leaking"


def never(*_arguments: object, **_options: object) -> None:
    raise AssertionError("this was begun for a model that is refused")


def test_before_its_demonstrations(leaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imitation, "warm_started", never)
    overrides = [f"model.path={leaking}", "model.warm_start.demonstrations=10"]
    with pytest.raises(ConfigError, match=f"^model.path='{leaking}' cannot be trained: {LEAKS}"):
        prepare._model_folder(load_config(EXPERIMENTS / "math_cpu.yaml", overrides))


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("overrides", "told"),
    [((), LEAKS), (("generator.max_model_len=5000", "model.untested=true"), "reads at most 4096")],
)
def test_by_its_config_alone_before_tasks_are_made_and_without_torch(
    overrides: tuple[str, ...], told: str, dry: bool, leaking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for a context that it was not made for."""
    for name in ("prepare", "_count_tasks"):
        monkeypatch.setattr(preflight, name, never)
    monkeypatch.setattr(preflight, "_installed", lambda: False)
    if overrides:
        AutoConfig.for_model("qwen3", max_position_embeddings=4096).save_pretrained(leaking)
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [f"model.path={leaking}", f"runs={tmp_path}", *overrides])
    with pytest.raises(ConfigError, match=told):
        preflight.check(config, dry=dry)


def test_a_model_of_the_hub_is_judged_before_tasks_are_made(
    leaking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _name, file: str(leaking / file))
    for name in ("prepare", "_count_tasks"):
        monkeypatch.setattr(preflight, name, never)
    config = load_config(EXPERIMENTS / "math_cpu.yaml", ["model.path=someone/leaking", f"runs={tmp_path}"])
    with pytest.raises(ConfigError, match=f"^model.path='someone/leaking' cannot be trained: {LEAKS}"):
        preflight.check(config, dry=False)


def test_a_model_that_the_user_names_is_trained_by_no_warm_start_that_was_not_asked_for(tmp_path: Path) -> None:
    """Neither by a line of the command nor by a recipe of the user's own."""
    shipped = EXPERIMENTS / "own_reward_cpu.yaml"
    assert load_config(shipped, ["seed=1"]).model.warm_start.demonstrations == 1000
    assert load_config(shipped, ["model.path=tiny"]).model.warm_start.demonstrations == 1000
    assert load_config(shipped, ["model.path=mine"]).model.warm_start.demonstrations == 0

    low = tmp_path / "low.yaml"
    low.write_text("model: {warm_start: {demonstrations: 9, steps: 3}}")  # of the tiny model, which is not named
    own = tmp_path / "own.yaml"
    own.write_text("base: low.yaml\nmodel: {path: mine}")
    assert load_config(low, ["model.path=mine"]).model.warm_start.demonstrations == 0
    assert load_config(own).model.warm_start.demonstrations == 0

    asked = load_config(shipped, ["model.path=mine", "model.warm_start.demonstrations=7"]).model.warm_start
    assert asked.demonstrations == 7 and asked.steps == 400, "no number of the tiny model's"
    own.write_text("base: low.yaml\nmodel: {path: mine, warm_start: {demonstrations: 5}}")
    assert load_config(own, ["seed=1"]).model.warm_start.demonstrations == 5


def test_of_the_hub_before_its_weights_are_fetched(leaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda _name, file: str(leaking / file))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)
    with pytest.raises(ConfigError, match=f"^model.path='someone/leaking' cannot be trained: {LEAKS}"):
        prepare._model_folder(load_config(EXPERIMENTS / "math_cpu.yaml", ["model.path=someone/leaking"]))


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("algo.kl.reference", ["algo.kl.coef=0.1", "algo.kl.reference={0}"]),
        ("algo.critic.path", ["algo.critic.path={0}", "algo.advantage=gae"]),
    ],
)
def test_reference_and_critic_are_judged_as_well(field: str, overrides: list[str], leaking: Path) -> None:
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [each.format(leaking) for each in overrides])
    with pytest.raises(ConfigError, match=f"^{field}='{leaking}' cannot be trained: {LEAKS}"):
        prepare._model_folder(config)


@pytest.mark.parametrize(
    ("field", "overrides"),
    [
        ("algo.kl.reference", ["algo.kl.coef=0.1", "algo.kl.reference={0}"]),
        ("algo.teacher", ["algo.loss=reverse_kl", "algo.teacher={0}"]),
    ],
)
@pytest.mark.parametrize("make", [True, False])
def test_a_model_that_reads_less_than_the_student_samples(
    field: str, overrides: list[str], make: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its numbers beyond that mean nothing, and no guard would see it. It is refused before the student is made."""
    monkeypatch.setattr(imitation, "warm_started", never)
    short = save_family("qwen3", tmp_path / "short", max_position_embeddings=64)
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [each.format(short) for each in overrides])
    told = f"^generator.max_model_len=128: the model of {field}='{short}' reads at most 64 tokens"
    with pytest.raises(ConfigError, match=told):
        prepare._folders(config, make=make)


def test_a_teacher_that_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imitation, "warm_started", never)
    config = load_config(EXPERIMENTS / "math_cpu.yaml", ["algo.loss=reverse_kl", "algo.teacher=./no/such"])
    with pytest.raises(ConfigError, match=r"^algo.teacher='./no/such': no such folder, and no hub name"):
        prepare._folders(config, make=True)


def test_what_no_test_has_runs_if_that_is_wanted(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    told = json.loads((tmp_path / "config.json").read_text()) | {"model_type": "helium"}
    (tmp_path / "config.json").write_text(json.dumps(told))
    path = f"model.path={tmp_path}"
    with pytest.raises(ConfigError, match=r"helium: no test has this family.*model.untested=true"):
        prepare._model_folder(load_config(EXPERIMENTS / "math_cpu.yaml", [path]))
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [path, "model.untested=true"])
    assert prepare._model_folder(config) == tmp_path


def test_pickled_weights_are_refused_before_anything_is_made_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imitation, "warm_started", never)
    save_family("qwen3", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    overrides = [f"model.path={tmp_path}", "model.warm_start.demonstrations=10"]
    with pytest.raises(ConfigError, match=r"^model.path: no safetensors file .*pytorch_model.bin is not read"):
        prepare._model_folder(load_config(EXPERIMENTS / "math_cpu.yaml", overrides))


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("truncated", r"model.safetensors in .* cannot be read \(.*\); fetch it again"),
        ("not finite", r"model.layers.1.mlp.up_proj.weight in model.safetensors has numbers that are not finite"),
        ("of another", r"tokenizer.json has ids up to \d+, and the embedding 256 rows: of another model"),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_weights_of_others_are_read_before_anything_is_made_of_them(
    what: str, told: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imitation, "warm_started", never)
    monkeypatch.setattr(foreign, "_READ_WHOLE", 1 << 40 if whole else 0)
    save_family("qwen3", tmp_path)
    weights = tmp_path / "model.safetensors"
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    if what == "not finite":
        tensors = load_file(weights)
        tensors["model.layers.1.mlp.up_proj.weight"][-1, 3] = torch.nan
        save_file(tensors, weights, {"format": "pt"})
    if what == "of another":
        shutil.copy(make_folder("qwen3", tmp_path / "larger") / "tokenizer.json", tmp_path)

    overrides = [f"model.path={tmp_path}", "model.warm_start.demonstrations=10"]
    with pytest.raises(ConfigError, match=f"^model.path.*: .*{told}"):
        prepare._model_folder(load_config(EXPERIMENTS / "math_cpu.yaml", overrides))


def test_a_rank_needs_no_memory_of_its_host_for_the_model_that_it_loads() -> None:
    """Of 32 billion parameters on four GPUs; each rank read 123 GiB before."""
    config = load_config(EXPERIMENTS / "math_8gpu.yaml", ["learner.ranks=4"])
    (rank,) = [need for need in estimate(config, "cuda", ModelShape.of(THIRTY_TWO_B)) if need.what == "learner rank"]
    assert rank.count == 4 and rank.each < 1 << 30


@pytest.mark.parametrize(
    ("saved", "given", "told"),
    [
        (None, "{rank: 4}", r"model.lora=\{'rank': 4, .*resume='.*' was trained with model.lora=null"),
        ({"rank": 4, "alpha": 8.0, "targets": ["q_proj"], "base": "x"}, "null", r"model.lora=null: .*\['q_proj'\]"),
        ({"rank": 4, "alpha": 8.0, "targets": "all-linear", "base": "x"}, "{rank: 4}", r"'alpha': 32.0.*'alpha': 8.0"),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused_before_anything_starts(
    saved: dict[str, Any] | None, given: str, told: str, tmp_path: Path
) -> None:
    """Of fewer targets it would be read in part, of another alpha it would count otherwise."""
    begin(tmp_path / "checkpoints", 3)
    checkpoint = commit(tmp_path / "checkpoints", Meta(3, 0, 1, saved), b"", 1)
    overrides = [f"resume={checkpoint}", f"model.lora={given}", f"runs={tmp_path}"]
    with pytest.raises(ConfigError, match=told):
        preflight._check_folders(load_config(EXPERIMENTS / "math_cpu.yaml", overrides), dry=True)


def test_adapters_beside_other_weights_are_refused_before_anything_starts(tmp_path: Path) -> None:
    model = save_family("llama", tmp_path / "model")
    options = LoraOptions(rank=4).identity()
    for step, base in ((3, digest_of({model / "model.safetensors"})), (4, "x")):
        begin(tmp_path / "checkpoints", step)
        commit(tmp_path / "checkpoints", Meta(step, 0, 1, options | {"base": base}), b"", 9)

    def folders(step: int) -> dict[str, object]:
        overrides = [f"model.path={model}", "model.lora={rank: 4}", f"resume={tmp_path}/checkpoints/step-{step}"]
        return prepare._folders(load_config(EXPERIMENTS / "math_cpu.yaml", overrides), make=True)

    assert folders(3)["folder"] == str(model)
    with pytest.raises(ConfigError, match=r"^model.path='.*model': the adapters of resume='.*step-4' belong to other"):
        folders(4)


def test_the_same_adapters_go_on_whatever_the_order_of_their_targets(tmp_path: Path) -> None:
    saved = LoraOptions(rank=4, targets=["v_proj", "q_proj"]).identity() | {"base": "x"}
    begin(tmp_path / "checkpoints", 3)
    checkpoint = commit(tmp_path / "checkpoints", Meta(3, 0, 1, saved), b"", 1)
    overrides = [f"resume={checkpoint}", "model.lora={rank: 4, targets: [q_proj, v_proj]}", f"runs={tmp_path}"]
    preflight._check_folders(load_config(EXPERIMENTS / "math_cpu.yaml", overrides), dry=True)


def test_an_evaluation_takes_the_adapters_of_its_checkpoint(tmp_path: Path) -> None:
    """Whatever recipe it is evaluated with; of a model that was trained whole it takes none."""
    saved = LoraOptions(rank=4).identity() | {"base": "x"}
    for step, lora in ((3, saved), (4, None)):
        begin(tmp_path / "checkpoints", step)
        checkpoint = commit(tmp_path / "checkpoints", Meta(step, 0, 1, lora), b"", 9)
        arguments = parse(["eval", str(checkpoint), "--recipe", str(EXPERIMENTS / "math_lora_cpu.yaml")])
        config = configure(str(checkpoint), arguments)
        assert config.resume == checkpoint
        assert config.model.lora == (LoraOptions(rank=4).identity() if lora else None)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("{rank: 4, targets: [qkv_proj]}", "model.lora.targets: llama has no linear layer 'qkv_proj'; did you mean"),
        ("{rank: 100}", "model.lora.rank=100: .* has rank 64 itself; lower it"),
    ],
)
def test_adapters_that_a_model_cannot_have_are_refused_before_it_is_read(given: str, told: str, tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not looked at")
    config = load_config(EXPERIMENTS / "math_cpu.yaml", [f"model.path={tmp_path}", f"model.lora={given}"])
    with pytest.raises(ConfigError, match=f"^model.path='{tmp_path}' cannot be trained: {told}"):
        prepare._model_folder(config)


def test_adapters_take_of_a_rank_what_they_are_and_the_base_its_own_dtype() -> None:
    """Qwen3-32B on eight ranks: 8 GiB of weights each and next to nothing of the optimizer; its reference is free."""
    shape = ModelShape.of(THIRTY_TWO_B)
    assert shape.trained == pytest.approx(32.8e9, rel=0.01)

    def parts(*overrides: str) -> dict[str, int]:
        settings = ["learner.ranks=8", "model.dtype=bfloat16", "learner.activation_checkpointing=true", *overrides]
        needs = estimate(load_config(EXPERIMENTS / "math_cpu.yaml", settings), "cuda", shape)
        (found,) = [need.parts for need in needs if need.what == "learner's GPU"]
        return found

    whole, lora = parts(), parts("model.lora={rank: 16}")
    adapters = shape.adapters(16)
    assert adapters == pytest.approx(134e6, rel=0.01)  # 7 layers of 64 decoders
    assert whole["weights"] == 4 * shape.trained // 8 and whole["optimizer"] == 2 * whole["weights"]
    assert lora["weights"] == (2 * shape.trained + 4 * adapters) // 8 and lora["optimizer"] == adapters
    assert lora["gradients"] == adapters // 2 and lora["working space"] < whole["working space"]

    assert parts("model.lora={}", "algo.kl.coef=0.1")["weights"] == lora["weights"]
    critic = ["algo.advantage=gae", "algo.critic={}"]
    assert parts("model.lora={}", *critic)["optimizer"] == lora["optimizer"] + 2 * 4 * shape.valuing // 8
    assert shape.trained - shape.valuing == shape.matrix  # it has no head over the vocabulary


def test_with_states_on_the_host_a_gpu_holds_weights_and_gradients() -> None:
    """Of 8B in bfloat16 six bytes a parameter, or four; the host has sixteen. So a rank and an engine share 80 GB."""
    told = THIRTY_TWO_B | {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 36}
    shape = ModelShape.of(told | {"intermediate_size": 12288})
    assert shape.trained == pytest.approx(8.19e9, rel=0.01)
    host, bfloat16 = "learner.optimizer_states=host", "learner.reduce_dtype=bfloat16"
    machine = Machine([Gpu("0", gpu_bytes(80))])

    def needs(*overrides: str) -> list[Need]:
        settings = [f"model.path={EXPERIMENTS}", *overrides]
        return estimate(load_config(EXPERIMENTS / "math_1gpu.yaml", settings), "cuda", shape, machine)

    def parts(what: str, *overrides: str) -> dict[str, int]:
        (found,) = [need.parts for need in needs(*overrides) if need.what == what]
        return found

    share = "learner's share of a GPU"
    for overrides, gradient in (([host], 4), ([host, bfloat16], 2)):
        held = parts(share, *overrides)
        assert (held["weights"], held["gradients"]) == (2 * shape.trained, gradient * shape.trained)
        assert "optimizer" not in held
        rank = parts("learner rank", *overrides)
        assert sum(size for part, size in rank.items() if part != "process") == 16 * shape.trained
    assert "moments" not in parts("learner rank", bfloat16) and parts(share)["optimizer"] == 8 * shape.trained

    for overrides in ([host, "placement=alternate"], [host, bfloat16]):
        check_memory(needs(*overrides), machine)
    with pytest.raises(ConfigError, match=r"see learner.ranks, learner.optimizer_states, placement=alternate and m"):
        check_memory(needs(bfloat16), machine)
    with pytest.raises(ConfigError, match=r"^learner.ranks: the run needs about 1[67]\d.* of memory"):
        check_memory(needs(host), dataclasses.replace(machine, memory=128 << 30))

    reference = ["algo.kl.coef=0.1", host]
    assert parts(share, *reference)["weights"] == 4 * shape.trained
    lora = ["model.lora={rank: 16}", host]
    assert parts(share, *lora)["weights"] == 2 * shape.trained + 4 * shape.adapters(16)
    assert parts("learner rank", *lora)["moments"] == 8 * shape.adapters(16)


def test_a_version_of_adapters_alone_is_as_large_as_they_are() -> None:
    """Of Qwen3-32B an engine holds all, and a slot of weights a two-hundredth."""
    shape = ModelShape.of(THIRTY_TWO_B)

    def parts(serve: str) -> tuple[int, int]:
        settings = [
            f"model.lora={{rank: 16, serve: {serve}}}",
            "generator.tensor_parallel=2",
            "generator.dtype=bfloat16",
        ]
        needs = estimate(load_config(EXPERIMENTS / "math_cpu.yaml", settings), "cuda", shape)
        found = {need.what: need.parts["weights"] for need in needs if "weights" in need.parts}
        return found["engine's GPU"], found["weight slot"]

    assert parts("merged") == (shape.trained, 2 * shape.trained)
    assert parts("adapter") == (shape.trained + shape.adapters(16), 2 * shape.adapters(16))
    assert 200 < shape.trained / shape.adapters(16) < 300


@pytest.mark.parametrize("family", ["qwen3_moe", "glm4"])
def test_engines_that_cannot_have_adapters_are_refused_by_name(family: str) -> None:
    """Whatever the targets."""
    config = load_config(EXPERIMENTS / "math_cpu.yaml", ["model.lora={serve: adapter, targets: [q_proj]}"])
    prepare.check_family_of(config, {"model_type": "qwen3"})
    with pytest.raises(ConfigError, match=f"^model.lora.serve=adapter: {family}: .*; set model.lora.serve=merged$"):
        prepare.check_family_of(config, {"model_type": family})

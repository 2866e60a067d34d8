"""Adapters that somebody has made go on as they are, whoever wrote them; all others are refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launch.prepare import check_model_is_trainable
from rl.config.lora import LoraOptions
from rl.config.schema import ConfigError, load_config
from rl.learner.trainer import Trainer
from rl.models.loading import copied
from rl.models.packing import sequence_pack
from rl.models.policy import Base, Policy
from rl.models.protocol import ModelOptions
from tests.rl.learner.ranks import process_group, results_of_ranks
from tests.rl.models.tiny_families import VOCABULARY, save_family

IDS = torch.randint(3, VOCABULARY, (40,), generator=torch.Generator().manual_seed(1)).tolist()
TARGETS = {"qwen3": ["q_proj", "down_proj", "lm_head"], "qwen3_moe": ["q_proj", "experts"]}


@torch.no_grad()
def written_by_peft(family: str, folder: Path) -> torch.Tensor:
    """A model in `folder/start` and adapters in `folder/theirs`; log-probabilities of IDS[1:] under their sum."""
    start = save_family(family, folder / "start")
    base = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32).eval()
    linear = [name for name in TARGETS[family] if name != "experts"]
    experts = ["experts.gate_up_proj", "experts.down_proj"] if "experts" in TARGETS[family] else None
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=4, lora_alpha=6, target_modules=linear, target_parameters=experts)
    )
    random = torch.Generator().manual_seed(2)
    for name, each in model.named_parameters():
        if "lora_" in name:
            each.copy_(torch.empty(each.shape).normal_(0, 0.1, generator=random))
    model.save_pretrained(str(folder / "theirs"))
    logits = model.eval()(torch.tensor([IDS])).logits[0, :-1]
    found: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]
    return found


def options_of(family: str, folder: Path, **changes: Any) -> LoraOptions:
    given = {"rank": 4, "alpha": 6, "targets": TARGETS[family], "start": str(folder / "theirs")}
    return LoraOptions(**(given | changes))


def setting(options: LoraOptions) -> str:
    return f"model.lora={json.dumps(options.model_dump())}"


def rank_main(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    path = Path(folder)
    family = json.loads((path / "start" / "config.json").read_text())["model_type"]
    with process_group(folder, rank, 2) as mesh, torch.no_grad():
        policy = Policy.load(path / "start", mesh, options=ModelOptions(lora=options_of(family, path)))
        torch.save({"logp": policy(sequence_pack(IDS)).logp[1:]}, path / f"rank{rank}.pt")


@pytest.mark.parametrize("family", TARGETS)
def test_what_peft_has_written_goes_on_as_it_is(family: str, tmp_path: Path) -> None:
    theirs = written_by_peft(family, tmp_path)
    folder = tmp_path / "start"
    options = options_of(family, tmp_path)
    check_model_is_trainable(
        load_config(
            None, [f"model.path={folder}", "sampling.max_tokens=64", "generator.max_model_len=256", setting(options)]
        ),
        folder,
    )

    policy = Policy.load(folder, options=ModelOptions(lora=options))
    pack = sequence_pack(IDS)
    with torch.no_grad():
        torch.testing.assert_close(policy(pack).logp[1:], theirs, rtol=0, atol=5e-5)
        assert (policy(pack).logp - Policy.load(folder)(pack).logp).abs().max() > 0.1
    for rank in results_of_ranks(rank_main, tmp_path, 2):
        torch.testing.assert_close(rank["logp"], theirs, rtol=0, atol=5e-5)


def test_the_reference_is_what_it_began_as(tmp_path: Path) -> None:
    """With the adapters that it began with, and not without any: the KL would pull it back to before them."""
    theirs = written_by_peft("qwen3", tmp_path)
    lora = setting(options_of("qwen3", tmp_path))
    config = load_config(None, ["model.dtype=float32", f"model.path={tmp_path / 'start'}", "algo.kl.coef=0.1", lora])
    trainer = Trainer(config, tmp_path / "start", last_step=1)
    pack = sequence_pack(IDS)
    with torch.no_grad():
        for _, parameter in trainer.policy.trainable():
            parameter.add_(0.1)
        moved = trainer.policy(pack).logp
        assert isinstance(trainer.reference, Base)
        torch.testing.assert_close(trainer.reference(pack).logp[1:], theirs, rtol=0, atol=5e-5)
        assert torch.equal(trainer.policy(pack).logp, moved) and (moved[1:] - theirs).abs().max() > 0.1
        start = Policy.load(tmp_path / "start", options=ModelOptions(lora=trainer.lora))
        begun = {name: tensor for name, tensor, _ in start.adapters()}
        found = {name: tensor for name, tensor, _ in trainer.reference.export(untie=False)}
        assert begun and all(torch.equal(found[name], tensor) for name, tensor in begun.items())
        own = {each.data_ptr() for each in trainer.policy.parameters()}
        assert {tensor.data_ptr() for name, tensor in found.items() if name not in begun} <= own

        copied(trainer.policy, "meta")  # as to the device, where the learner has its turn
        assert {tensor.device.type for _, tensor, _ in trainer.reference.export(untie=False)} == {"meta"}


def _config(**changes: Any) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _tensors(name: str, shape: tuple[int, ...] | None) -> Any:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        tensors = load_file(path)
        tensors.pop(name, None)
        save_file(tensors | ({name: torch.zeros(shape)} if shape else {}), path)

    return change


A = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
CASES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "rank": ({"rank": 8}, None, r"has r=4 and lora_alpha=6, not model.lora.rank=8 and alpha=6; set them so"),
    "alpha": ({"alpha": 8}, None, r"has r=4 and lora_alpha=6, not model.lora.rank=4 and alpha=8; set them so"),
    "fewer targets": (
        {"targets": ["q_proj"]},
        None,
        r"has '.*', one of 6 that are beside no layer of model.lora.targets",
    ),
    "more targets": ({"targets": "all-linear"}, None, r"has no '.*', one of \d+ that model.lora.targets needs"),
    "base": (
        {},
        _config(base_model_name_or_path="Qwen/Qwen3-8B"),
        r"belongs to 'Qwen/Qwen3-8B', and model.path is '.*start'",
    ),
    "dora": ({}, _config(use_dora=True), r"says use_dora=True, and only plain adapters can go on"),
    "rslora": ({}, _config(use_rslora=True), r"says use_rslora=True, and only plain adapters can go on"),
    "pissa": ({}, _config(init_lora_weights="pissa"), r"says init_lora_weights='pissa', and only plain adapters"),
    "another kind": ({}, _config(peft_type="IA3"), r"says peft_type='IA3', and only plain adapters"),
    "patterns": ({}, _config(rank_pattern={"q_proj": 8}), r"says rank_pattern=\{'q_proj': 8\}, and only plain"),
    "of later": ({}, _config(new_kind={"a": 1}), r"says new_kind=\{'a': 1\}, and only plain adapters can go on"),
    "a layer less": ({}, _tensors(A, None), rf"has no '{A}', one of 1 that"),
    "another shape": ({}, _tensors(A, (4, 65)), rf"'{A}' is of shape \[4, 65\], and the model needs \[4, 64\]"),
    "pickled": (
        {},
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        r"has no adapter_model.safetensors",
    ),
    "no folder": (
        {"start": "nowhere"},
        None,
        r"model.lora.start='nowhere' is no folder of adapters: adapter_config.json",
    ),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("peft")
    written_by_peft("qwen3", folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_adapters_of_another_kind_are_refused_in_one_line(case: str, theirs: Path, tmp_path: Path) -> None:
    given, change, told = CASES[case]
    copied = tmp_path / "theirs"
    copied.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (copied / name).write_bytes((theirs / "theirs" / name).read_bytes())
    if change is not None:
        change(copied)

    config = load_config(None, [f"model.path={theirs / 'start'}", setting(options_of("qwen3", tmp_path, **given))])
    with pytest.raises(ConfigError, match=told) as raised:
        check_model_is_trainable(config, theirs / "start")
    assert "\n" not in str(raised.value) and "model.lora.start=" in str(raised.value)

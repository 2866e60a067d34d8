"""Every family that can be trained: packs, dropout and exports, on tiny random weights; and who is refused, by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from experiments import families
from rl.models.families import FAMILIES, REFUSED, check_family, check_layers
from rl.models.packing import sequence_pack
from rl.models.policy import Policy, check_trainable
from tests.rl.models.tiny_families import SHAPES, VOCABULARY, save_family

LENGTHS = (40, 23, 40, 57)
PROMPT = 10  # that the first three share


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(request.param, tmp_path_factory.mktemp(request.param), dropout=0.5)


@pytest.fixture
def policy(folder: Path) -> Policy:
    torch.set_num_threads(1)
    return Policy.load(folder)


def samples() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    made = [torch.randint(3, VOCABULARY, (length,), generator=random) for length in LENGTHS]
    for each in made[:3]:
        each[:PROMPT] = made[0][:PROMPT]
    return made


def packed_logp(policy: Policy, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    pack = sequence_pack(*(each.tolist() for each in ids))
    return list(policy(pack).logp.split([len(each) for each in ids]))


def test_a_pack_equals_its_samples_one_by_one(folder: Path, policy: Policy) -> None:
    judge = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ids = samples()
    with torch.no_grad():
        for found, each in zip(packed_logp(policy, ids), ids, strict=True):
            logits = judge(each[None], use_cache=False).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(-1, each[1:, None])[:, 0]
            torch.testing.assert_close(found[1:], expected, rtol=0, atol=5e-5)


def test_every_parameter_has_a_gradient(policy: Policy) -> None:
    torch.cat(packed_logp(policy, samples())).sum().backward()
    assert not [name for name, parameter in policy.named_parameters() if parameter.grad is None]


def test_two_forwards_in_training_are_equal(folder: Path, policy: Policy) -> None:
    assert policy.training
    first, second = (torch.cat(packed_logp(policy, samples())) for _ in range(2))
    assert torch.equal(first, second)


def test_an_export_is_read_back(folder: Path, policy: Policy, tmp_path: Path) -> None:
    saved = load_file(folder / "model.safetensors")
    rows = {name: rows.clone() for name, rows, _ in policy.export(untie=False)}
    assert rows.keys() == saved.keys() and all(torch.equal(rows[name], saved[name]) for name in saved)

    rows = {name: value + 1 for name, value in rows.items()}
    save_file(rows, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again.keys() == rows.keys() and all(torch.equal(value, rows[name]) for name, value in again.items())
    assert all(torch.equal(whole, saved[name]) for name, whole in policy.gather(saved))


# ---------------------------------------------------------------- who is on the list, and who is not


def test_every_family_has_a_shape_here_and_the_document_has_the_tables_of_the_command() -> None:
    document = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert families.families() in document and families.refused() in document
    assert all(f"| `{name}` | {family.models} |" in document for name, family in FAMILIES.items())
    assert all(f"`{name}`" in document for name in REFUSED)
    assert SHAPES.keys() == FAMILIES.keys() and not FAMILIES.keys() & REFUSED.keys()


def test_every_name_is_one_that_transformers_knows() -> None:
    assert not (FAMILIES.keys() | REFUSED.keys()) - CONFIG_MAPPING_NAMES.keys()


def saved_config(folder: Path, model_type: str, **changes: object) -> Path:
    AutoConfig.for_model(model_type).save_pretrained(folder)
    told = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(told))
    return folder


@pytest.mark.parametrize("untested", [False, True])
@pytest.mark.parametrize("family", REFUSED)
def test_a_family_with_a_known_fault_is_refused_from_its_configuration(family: str, untested: bool) -> None:
    with pytest.raises(ValueError, match=f"^{family}: {re.escape(REFUSED[family])}"):
        check_family({"model_type": family}, untested=untested)


def test_a_family_that_no_test_has_is_refused_or_runs_if_that_is_wanted(tmp_path: Path) -> None:
    folder = saved_config(tmp_path, "helium", num_hidden_layers=1, hidden_size=64, intermediate_size=64)
    with pytest.raises(ValueError, match=r"^helium: no test has this family.*llama, qwen2, .*model.untested=true"):
        check_trainable(folder)
    check_trainable(folder, untested=True)


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "qwen3",
            {"layer_types": ["conv", "full_attention"]},
            "layers of the kind conv: .* a state along a pack",
        ),
        ("helium", {"layer_types": ["linear_attention"]}, "layers of the kind linear_attention"),
        ("helium", {"num_local_experts": 8}, "a mixture of experts, and those that are tested are qwen3_moe, "),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, r"weights are quantized \(fp8\)"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 changes them"),
        ("llama", {"logit_scale": 0.5}, "logit_scale=0.5 changes them"),
    ],
)
def test_what_no_family_may_have(family: str, changes: dict[str, object], reason: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"^{family}: .*{reason}"):
        check_trainable(saved_config(tmp_path, family, **changes), untested=True)


@pytest.mark.parametrize("family", ["lfm2", "bamba", "falcon_h1", "mamba2"])
def test_a_recurrence_is_found_among_the_layers_whatever_the_family_is_called(family: str) -> None:
    kinds = {"layer_types": ["conv", "full_attention"]} if family == "lfm2" else {}
    config = AutoConfig.for_model(family, num_hidden_layers=2, **kinds)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"^{family}: it has .*Conv1d"):
        check_layers(model)


def test_a_refused_family_is_not_loaded_either(tmp_path: Path) -> None:
    """Who loads a model by itself, as a test or a bench does, is told as a run is."""
    (tmp_path / "config.json").write_text('{"model_type": "lfm2"}')
    with pytest.raises(ValueError, match="lfm2: its layers carry a state"):
        Policy.load(tmp_path)

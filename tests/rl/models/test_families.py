"""Every family that can be trained: packs, dropout and exports, on tiny random weights; and who is refused, by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from rl.models.families import FAMILIES, REFUSED
from rl.models.policy import Policy, load_policy, local_rows
from tests.rl.models.tiny_families import SHAPES, VOCABULARY, save_family

LENGTHS = (40, 23, 40, 57)
PROMPT = 10  # that the first three share


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_family(request.param, tmp_path_factory.mktemp(request.param), dropout=0.5)


@pytest.fixture
def policy(folder: Path) -> Policy:
    torch.set_num_threads(1)
    return load_policy(folder)


def samples() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    made = [torch.randint(3, VOCABULARY, (length,), generator=random) for length in LENGTHS]
    for each in made[:3]:
        each[:PROMPT] = made[0][:PROMPT]
    return made


def packed_logp(policy: Policy, ids: list[torch.Tensor]) -> list[torch.Tensor]:
    positions = torch.cat([torch.arange(len(each)) for each in ids])
    return list(policy(torch.cat(ids), positions).logp.split([len(each) for each in ids]))


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
    rows = {name: rows.clone() for name, rows, _ in local_rows(policy, untie=False)}
    assert rows.keys() == saved.keys() and all(torch.equal(rows[name], saved[name]) for name in saved)

    rows = {name: value + 1 for name, value in rows.items()}
    save_file(rows, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(value, rows[name]) for name, value in read.named_parameters())


def test_every_family_has_a_shape_here() -> None:
    assert SHAPES.keys() == FAMILIES.keys() and not FAMILIES.keys() & REFUSED.keys()

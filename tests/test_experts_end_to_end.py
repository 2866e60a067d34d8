"""A mixture of experts in the complete system: vLLM tells whom its routers chose, two FSDP ranks choose the same."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.models.policy import Policy
from rl.store.batch_files import read_batch_parts
from rl.wire.columns import register, routed_experts
from tests.rl.models.test_routers import own_choices
from tests.rl.models.tiny_families import save_family
from tests.test_end_to_end_real import nothing_is_left, system
from tests.test_lora_end_to_end import steps_of

pytestmark = pytest.mark.families


def model(folder: Path) -> Path:
    """With the tokenizer of the tiny model, and its vocabulary."""
    tiny = ensure_tiny_model(TinyRecipe(hidden_size=32, ffn_size=64, sft_steps=0))
    told = json.loads((tiny / "config.json").read_text())
    save_family("qwen3_moe", folder, **{name: told[name] for name in ("vocab_size", "eos_token_id", "pad_token_id")})
    for path in tiny.iterdir():
        if "token" in path.name or path.name.endswith((".jinja", "generation_config.json")):
            shutil.copy(path, folder)
    return folder


def test_engine_and_learner_agree_over_updates_and_choose_the_same_experts(tmp_path: Path, own_table: None) -> None:
    start = model(tmp_path / "model")
    settings = ("algo.entropy_coef=0.1", "alarms.exact=1e-4", "steps=4", "sampling.max_tokens=128", "eval.tasks=0")
    with system(tmp_path, f"model.path={start}", *settings) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    nothing_is_left(tmp_path)

    folder = tmp_path / "simulated"
    rows = steps_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["exact/tokens"] > 50 and row["exact/unknown"] == 0 and row["exact/max"] < 1e-4 for row in rows)
    for row in rows:
        assert row["router/gap"] <= 2 * row["router/gap_without_replay"] + 1e-5 and 0 < row["router/entropy"] < 1
        assert row["router/smallest"] < 1 < row["router/largest"]
    assert rows[0]["router/differ"] < 0.01 < rows[-1]["router/differ"]  # later ones are trained on samples of before

    before, after = load_file(start / "model.safetensors"), load_file(folder / "model" / "model.safetensors")
    assert before.keys() == after.keys()
    still = [name for name in before if torch.equal(before[name], after[name])]
    assert not [name for name in still if name.endswith("gate.weight") or "self_attn" in name]

    policy = Policy.load(start)
    column = routed_experts(policy.model.config.to_dict())
    assert column is not None
    register(column)
    (part, *_) = read_batch_parts(folder)
    length = part.lengths[0]
    found = part.columns["routed_experts"][:length]
    expected = own_choices(policy, part.token_ids[:length].tolist()).numpy()
    known = part.policy_version[:length] <= 0
    last = len(found) if known.all() else int(np.argmin(known))  # of what the first version sampled
    assert (np.sort(found, -1) == np.sort(expected, -1))[:last].mean() > 0.99


@pytest.mark.parametrize(
    "settings",
    [
        ("model.lora={rank: 4, alpha: 8, targets: [q_proj, o_proj, experts]}",),
    ],
    ids=["adapters"],
)
def test_they_agree_as_well_with(settings: tuple[str, ...], tmp_path: Path) -> None:
    start = model(tmp_path / "model")
    settings += ("algo.entropy_coef=0.1", "alarms.exact=1e-4", "steps=3", "sampling.max_tokens=96", "eval.tasks=0")
    with system(tmp_path, f"model.path={start}", *settings) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-5000:]
    nothing_is_left(tmp_path)

    rows = steps_of(tmp_path / "simulated")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["exact/tokens"] > 50 and row["exact/unknown"] == 0 and row["exact/max"] < 1e-4 for row in rows)
    assert rows[0]["router/differ"] < 0.01
    assert all(row["router/gap"] <= 2 * row["router/gap_without_replay"] + 1e-5 for row in rows)

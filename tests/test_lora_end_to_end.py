"""LoRA in the complete system: vLLM, two FSDP ranks and the channel know nothing of it, and every token agrees."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rl.store.checkpoint_folder import read_meta
from tests.test_end_to_end_real import nothing_is_left, system

SETTINGS = (
    "model.lora={rank: 4, alpha: 8}",
    "algo.kl.coef=0.01",
    "algo.entropy_coef=0.1",  # an untrained model earns nothing, and would not move
    "alarms.exact=1e-4",
    "steps=4",
    "sampling.max_tokens=128",
)


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train/loss" in row]


def run(tmp_path: Path, *overrides: str, code: int = 0) -> str:
    with system(tmp_path, *SETTINGS, *overrides) as process:
        output, _ = process.communicate(timeout=600)
    assert process.returncode == code, output[-5000:]
    nothing_is_left(tmp_path)
    return output


@pytest.mark.docs
@pytest.mark.parametrize("serve", ["merged", "adapter"])
def test_engine_and_learner_agree_over_updates_and_a_resume(serve: str, tmp_path: Path) -> None:
    folder = tmp_path / "simulated"
    served = f"model.lora={{rank: 4, alpha: 8, serve: {serve}}}"
    run(tmp_path, served)
    rows = steps_of(folder)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["exact/tokens"] > 50 and row["exact/unknown"] == 0 and row["exact/max"] < 1e-4 for row in rows)
    assert rows[0]["loss/kl_reference"] < 1e-9 < rows[-1]["loss/kl_reference"]

    start = Path(json.loads((folder / "run.json").read_text())["model_folder"])
    base, trained = load_file(start / "model.safetensors"), load_file(folder / "model" / "model.safetensors")
    moved = {name for name in base if not torch.equal(base[name], trained[name])}
    assert moved == {name for name in base if name.endswith("_proj.weight")}

    saved = folder / "checkpoints" / "step-2"
    meta = read_meta(saved)
    assert meta.lora is not None and meta.lora_options == {"rank": 4, "alpha": 8.0, "targets": "all-linear"}

    goes_on(tmp_path, saved, served)
    if serve == "merged":
        is_refused_on_another_base(tmp_path, start)
    else:
        others_go_on(tmp_path, start)


def others_go_on(tmp_path: Path, start: Path) -> None:
    """From the adapters that a run has left another one begins, and is held to what it began as."""
    theirs = tmp_path / "theirs"
    (tmp_path / "simulated" / "adapter").rename(theirs)
    lora = f"model.lora={{rank: 4, alpha: 8, serve: adapter, start: {theirs}}}"
    run(tmp_path, f"model.path={start}", lora, "name=another", "steps=2")
    rows = steps_of(tmp_path / "another")
    assert all(row["exact/tokens"] > 50 and row["exact/max"] < 1e-4 for row in rows)
    assert rows[0]["loss/kl_reference"] < 1e-9 < rows[-1]["loss/kl_reference"]
    told = f"model.lora.start='{theirs}' has r=4 and lora_alpha=8, not model.lora.rank=8 and alpha=8; set them so"
    assert told in run(tmp_path, f"model.path={start}", lora.replace("rank: 4", "rank: 8"), "name=third", code=2)


def goes_on(tmp_path: Path, saved: Path, served: str) -> None:
    """Tokens of the versions before are not compared, as always; the first version is that of the checkpoint."""
    run(tmp_path, f"resume={saved}", served)
    rows = steps_of(tmp_path / "simulated")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["exact/max"] < 1e-4 for row in rows) and rows[-1]["exact/tokens"] > 50


def is_refused_on_another_base(tmp_path: Path, start: Path) -> None:
    shutil.copytree(start, tmp_path / "another")
    weights = load_file(start / "model.safetensors")
    weights["model.norm.weight"][0] += 1e-3
    save_file(weights, tmp_path / "another" / "model.safetensors", {"format": "pt"})
    saved = tmp_path / "simulated" / "checkpoints" / "step-4"
    output = run(tmp_path, "steps=6", f"resume={saved}", f"model.path={tmp_path / 'another'}", code=2)
    assert f"model.path='{tmp_path / 'another'}': the adapters of resume='{saved}' belong to other weights" in output
    assert saved.exists()  # nothing was set aside for a run that cannot begin

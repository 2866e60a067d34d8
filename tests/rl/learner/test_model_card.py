"""What stands beside exported weights: a card that says how they were made, and how they were sampled."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import yaml
from transformers import GenerationConfig

from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model
from rl.learner.model_card import texts_beside
from tests.conftest import MakeRun


def test_a_card_and_the_way_of_sampling(make_run: MakeRun, tmp_path: Path) -> None:
    folder = tmp_path / "start"
    shutil.copytree(ensure_tiny_model(TinyRecipe(sft_steps=0), tmp_path), folder)
    there = {"model_folder": folder, "train_tasks": 77}
    run = make_run("name=mine", "model.path=Qwen/Qwen3-8B", "sampling.temperature=0.7", "algo.loss=dapo", **there)
    assert [*texts_beside(run, 12)] == ["README.md"], "the start model's own generation config stays"

    (folder / "generation_config.json").unlink()
    texts = texts_beside(run, 12)
    _, head, text = texts["README.md"].split("---\n", 2)
    told = yaml.safe_load(head)
    assert told["base_model"] == "Qwen/Qwen3-8B" and told["library_name"] == "transformers"
    assert "# mine" in text and "12 steps" in text and "| loss | dapo |" in text and "| training tasks | 77 |" in text

    (tmp_path / "generation_config.json").write_text(texts["generation_config.json"])
    sampled = GenerationConfig.from_pretrained(tmp_path)
    assert sampled.temperature == 0.7 and sampled.do_sample
    ends = json.loads((folder / "config.json").read_text())["eos_token_id"]
    assert ends == sampled.eos_token_id


def test_a_folder_of_this_machine_is_not_told(make_run: MakeRun, tmp_path: Path) -> None:
    folder = ensure_tiny_model(TinyRecipe(sft_steps=0), tmp_path)
    card = texts_beside(make_run(f"model.path={folder}", model_folder=folder), 3)["README.md"]
    assert str(tmp_path) not in card and "base_model" not in card and folder.name in card

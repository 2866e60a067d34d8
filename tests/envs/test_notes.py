"""What environments say to who reads a failed sample: the gold answer, and what the verifier took for the model's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.envs.playing import episode, with_family

BOX = "no closed \\boxed{}"


@pytest.mark.parametrize(
    ("env", "response", "read"),
    [
        ("math", "so \\boxed{41}, no: \\boxed{17}", "17"),
        ("math", "it is 17", BOX),
        ("math", "it is \\boxed{17", BOX),
        ("reasoning_gym", "I say <answer> 17 </answer>", "17"),
        ("reasoning_gym", "I say 17", "no closed <answer>"),
        ("dataset", "<think>17?</think> 18 \n", "18"),
        ("dataset", "so <answer>17</answer>", "17"),
        ("mixture", "\\boxed{17}", "17"),
    ],
)
def test_the_gold_answer_and_what_was_read(tmp_path: Path, env: str, response: str, read: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + 1?", "answer": i + 1}) + "\n" for i in range(4)))
    options = {
        "math": [],
        "reasoning_gym": ["env.options.dataset=chain_sum"],
        "dataset": [f"env.options.source={rows}", "env.options.eval_count=1", "env.options.reward=exact"],
        "mixture": ["env.options.members={sums: {env: math}}"],
    }

    async def play(family: Any) -> None:
        _, (step,), environment = await episode(family, family.task("train", 1), [response])
        gold = await environment.gold()
        assert step.notes["read"] == read and step.notes["expected"] in gold
        assert step.notes["expected"].isdigit()

    with_family(play, f"env.name={env}", *options[env])

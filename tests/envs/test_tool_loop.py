"""The agent of the recipe: its tasks, its tools, and that the tiny models' template and parser fit together."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from envs.agents.tool_loop import OPERATIONS, Sum, ToolLoopFamily, ToolLoopOptions, called, demonstrate
from launch.warm_start.word_tokenizer import build_tokenizer, save_tokenizer
from rollout.episodes.parsing import HermesParser, check_parser
from rollout.episodes.tokenizer import ChatTokenizer


def test_held_out_sums_are_no_training_sums() -> None:
    family = ToolLoopFamily(ToolLoopOptions(), seed=3)
    splits = [{family.task(split, index).question for index in range(500)} for split in ("train", "eval")]
    assert not splits[0] & splits[1] and all(len(split) > 100 for split in splits)
    assert family.task("train", 7) == ToolLoopFamily(ToolLoopOptions(), seed=3).task("train", 7)


BROKEN = ["", "[]", "3", '{"a": 1}', '{"a": "1", "b": 2}', '{"a": 1e9, "b": 2}', '{"a": true, "b": 1}', "[" * 9999]


@pytest.mark.parametrize("arguments", BROKEN)
def test_tools_survive_what_a_model_writes(arguments: str) -> None:
    for name in (*OPERATIONS, "unknown", ""):
        assert called(name, arguments).startswith("error")
    assert called("multiply", '{"a": 6, "b": 7}') == "42" and called("divide", '{"a": 6, "b": 7}').startswith("error")


def test_demonstrations_are_read_by_the_parser_and_the_template_writes_what_it_reads(tmp_path: Path) -> None:
    family = ToolLoopFamily(ToolLoopOptions(), seed=0)
    shown = asyncio.run(demonstrate(family, 200, seed=1, mistakes=0.1, max_turns=3))
    right = 0
    for index, demonstration in enumerate(shown):
        task: Sum = family.task("train", index)
        ((name, arguments),) = HermesParser().parse(demonstration.turns[0].action).calls
        assert called(name, arguments) == demonstration.turns[1].action
        right += demonstration.turns[1].action == str(task.answer)
    assert 100 < right < 180  # there is something left to learn

    tokenizer = build_tokenizer([turn.action for demonstration in shown for turn in demonstration.turns])
    save_tokenizer(tokenizer, tmp_path, 256)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    check_parser(HermesParser(), ChatTokenizer(tmp_path))

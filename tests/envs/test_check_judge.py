"""`fresco env check` names a judge whose answers cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from envs.check.checks import SHORT
from envs.check.run import check_environment
from envs.dataset.judge import Judge
from rl.config.schema import load_config


def test_a_judge_whose_answers_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def talk(self: Judge, prompt: str) -> str:
        return "A fine answer, I like it."

    monkeypatch.setattr(Judge, "_ask", talk)
    rows = [{"prompt": f"Say {number}.", "answer": str(number)} for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    judge = "{url: 'http://127.0.0.1:9/v1', model: critic-8b, keep: false}"
    told = [f"env.options.source={tmp_path / 'rows.jsonl'}", "env.options.eval_count=8", "env.max_turns=1"]
    config = load_config(
        None, ["env.name=dataset", *told, "env.options.reward={judge: 1.0}", f"env.options.judge={judge}"]
    )

    page = check_environment(config, SHORT)
    (line,) = [
        each for each in page.text().splitlines() if "judge gave no score by judge.pattern" in each and "ends" in each
    ]
    assert page.failed and "critic-8b wrote 'A fine answer, I like it.'" in line

"""A mixture in the complete system of real processes, with simulated engines: each member's metrics stand apart."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_end_to_end_simulated import check_books, finish, start

MEMBERS = (
    "env.options={members: {short: {env: synthetic, weight: 3, max_turns: 1, max_tokens: 8, eval_tasks: 5},"
    " long: {env: synthetic, options: {turns: 2}, eval_tasks: 3}}}"
)


def test_members_have_their_own_limits_metrics_and_held_out_tasks(tmp_path: Path) -> None:
    more = "eval.sets={more: {env: synthetic, eval_tasks: 2}}"
    overrides = ("env.name=mixture", MEMBERS, "env.max_turns=2", "eval.tasks=10", more)
    summary = finish(start(tmp_path, *overrides), tmp_path)
    check_books(summary, steps=20)

    (path,) = tmp_path.rglob("metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [row for row in rows if "rollout/reward" in row]
    counts = {name: sum(row.get(f"rollout/{name}/episodes", 0) for row in trained) for name in ("short", "long")}
    assert sum(counts.values()) == summary["ledger"]["samples"]["trained"]
    assert counts["short"] > counts["long"] > 0  # 3 to 1 in a whole pass; these are 80 groups of it
    assert {row["rollout/short/turns"] for row in trained if "rollout/short/turns" in row} == {1.0}
    assert {row["rollout/long/turns"] for row in trained if "rollout/long/turns" in row} == {2.0}
    assert max(row.get("rollout/short/length", 0) for row in trained) <= 8

    (evaluated, *_) = [row for row in rows if "eval/accuracy" in row]
    weights = {"short": 5, "long": 3, "more": 2}
    assert {name: evaluated[f"eval/{name}/episodes"] for name in weights} == weights
    assert not any("rollout/more/reward" in row for row in rows), "a set is not trained"
    mean = sum(count * evaluated[f"eval/{name}/reward"] for name, count in weights.items()) / 10
    assert mean == pytest.approx(evaluated["eval/reward"])

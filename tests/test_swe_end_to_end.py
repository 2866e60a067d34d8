"""The complete system on software engineering, at reduced size: real sandboxes, real tests, real vLLM, on CPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from envs.swe.generate import write_tasks
from tests.envs.repositories import FILES, TASK, write_files
from tests.test_alfworld_end_to_end import run


@pytest.mark.docs
def test_the_laptop_recipe_imitates_an_agent_then_trains_in_sandboxes(tmp_path: Path) -> None:
    """Repositories come from the user's folder, so that nothing is fetched."""
    tasks = [replace(TASK, instance_id=f"ledger-{n}", package="") for n in range(3)]
    write_tasks(tasks, tmp_path / "tasks.jsonl")
    for task in tasks:
        write_files(FILES, tmp_path / "repositories" / task.instance_id)

    output, summary = run(
        "swe_cpu.yaml",
        tmp_path,
        tmp_path / "cache",
        f"env.options.source={tmp_path / 'tasks.jsonl'}",
        f"env.options.repositories={tmp_path / 'repositories'}",
        "env.options.eval_count=1",
        "env.max_turns=3",
        "env.options.sandboxes=8",
        "env.episodes_per_server=8",
        "model.warm_start={demonstrations: 8, steps: 50, batch: 4}",
        "generator.max_model_len=3072",
        "learner.max_tokens_per_pack=3072",
        "sampling.max_tokens=128",
        "steps=2",
        "rollout.groups_per_batch=2",
        "rollout.group_size=2",
        "eval.tasks=1",
    )

    losses = [float(loss) for loss in re.findall(r"step \d+/50  loss ([\d.]+)", output)]
    assert losses[-1] < 0.7 * losses[0]  # of the imitation
    assert summary["steps"] == 2 and summary["ledger"]["samples"]["trained"] == 8
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    calls = [row["env/tool_calls"] for row in rows if "env/tool_calls" in row]
    assert max(calls) > 0  # it has learned to begin calls; few of them are whole after so little

    judged = [row["env/pass_to_pass"] for row in rows if "env/pass_to_pass" in row]
    assert judged and min(judged) == 1  # the tests ran in sandboxes, and what was not touched passes

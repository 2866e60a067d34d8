"""Scheduling settings on the complete system of real processes, where core, shell and environment server must fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.test_end_to_end_simulated import check_books, finish, start

SETTINGS = {
    "baselines": ("rollout.batch_barrier=true", "rollout.pin_prompts=true", "rollout.alpha=0"),
    "filtering": ("rollout.filter_constant_groups=true", "rollout.redundant_groups=2", "rollout.surplus=cancel"),
    "curriculum": ("rollout.curriculum=success", "rollout.priority=freshest", "rollout.hold_patience=0"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_books_close_with(name: str, tmp_path: Path) -> None:
    summary = finish(start(tmp_path, *SETTINGS[name]), tmp_path)
    check_books(summary, steps=20)
    if name == "baselines":
        assert summary["staleness"]["max"] == 0
    if name == "filtering":
        assert summary["ledger"]["samples"]["redundant"] > 0
        assert summary["broker"]["cut"]["redundant"]["running"]["episodes"] > 0


def test_slow_episodes_are_hedged_on_the_other_server(tmp_path: Path) -> None:
    summary = finish(start(tmp_path, "rollout.hedge_quantile=0.8", "env.episodes_per_server=64"), tmp_path)
    check_books(summary, steps=20)
    broker = summary["broker"]
    assert broker["hedged"] > 0 and broker["hedges_won"] <= broker["hedged"]


def test_a_bad_name_ends_the_run_with_one_line(tmp_path: Path) -> None:
    output, _ = (process := start(tmp_path, "rollout.priority=freshes")).communicate(timeout=60)
    assert process.returncode != 0 and "did you mean 'freshest'" in output

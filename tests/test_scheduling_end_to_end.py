"""Scheduling settings on the complete system of real processes, where core, shell and environment server must fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.envs.lockstep import steps_out_of_turn
from tests.test_end_to_end_simulated import check_books, finish, start

pytestmark = pytest.mark.slow

SETTINGS = {
    "baselines": ("rollout.hooks=[batch_barrier, pin_prompts]", "rollout.alpha=0"),
    "filtering": (
        "rollout.filter_constant_groups=true",
        "rollout.redundant_groups=2",
        "env.episodes_per_server=32",  # a seat for each, and time to be cut while they run
        "env.options.mean_s=0.3",  # long beside what a busy machine makes episodes wait: they do not end all at once
        "env.options.sigma_s=0.3",
    ),
    "curriculum": ("rollout.curriculum=success", "rollout.priority=freshest", "rollout.hold_patience=0"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_books_close_with(name: str, tmp_path: Path) -> None:
    summary = finish(start(tmp_path, *SETTINGS[name]), tmp_path)
    check_books(summary, steps=20)
    if name == "baselines":
        assert summary["staleness"]["max"] == 0
    if name == "filtering":
        check_selection(summary)


def check_selection(summary: dict[str, Any]) -> None:
    """Extra groups are cut while they run: how far they had come is in the summary, and agrees with the ledger."""
    broker = summary["broker"]
    ledger = summary["ledger"]
    running = broker["cut"]["redundant"]["running"]
    assert ledger["samples"]["redundant"] > 0 and running["episodes"] > 0
    assert 0 < running["turns"] <= 2 and running["seconds"] > 0
    cut = broker["cut"]["redundant"]["finished"]
    tokens = running["tokens"] * running["episodes"] + cut["length"] * cut["episodes"]
    assert 0 < tokens == pytest.approx(ledger["tokens"]["redundant"])

    against = broker["kept_against_cut"]
    assert against["length"]["kept"] == pytest.approx(ledger["tokens"]["trained"] / ledger["samples"]["trained"])
    assert against["length"]["cut"] > 0 and 0 < against["turns"]["cut"] <= against["turns"]["kept"] == 2


def run_with_one_token(tmp_path: Path, *overrides: str) -> dict[str, Any]:
    """Ten steps with responses of one token, which are worth 0 or 1, and without groups of equal rewards."""
    options = (
        "rollout.filter_constant_groups=true",
        "rollout.max_filtered_per_step=1000",
        "env.options.turns=1",
        "sampling.max_tokens=1",
        "steps=10",
    )
    summary = finish(start(tmp_path, *options, *overrides), tmp_path)
    check_books(summary, steps=10)
    return summary


def test_dynamic_filtering_replaces_groups_without_signal(tmp_path: Path) -> None:
    """Responses of one token are worth 0 or 1, so half of the groups of two are constant: they end `filtered`."""
    summary = run_with_one_token(tmp_path, "rollout.group_size=2", "rollout.groups_per_batch=8")
    samples = summary["ledger"]["samples"]
    tokens = summary["ledger"]["tokens"]
    assert samples["filtered"] > 0 and samples["filtered"] % 2 == 0, "whole groups"

    cut = summary["broker"]["cut"]["filtered"]
    assert (cut["finished"]["episodes"], cut["running"]["episodes"]) == (samples["filtered"], 0)
    assert tokens["filtered"] == samples["filtered"], "one token each"
    rows = [json.loads(line) for line in (tmp_path / "simulated" / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["rollout/reward"] for row in rows if "rollout/reward" in row]

    assert rewards == [0.5] * 10, "every trained group of two has one reward of 1 and one of 0"


def test_groups_whose_first_episodes_are_equal_are_not_played_to_their_end(tmp_path: Path) -> None:
    """Responses of one token are worth 0 or 1: half of the groups end after two of four, and no other is constant."""
    summary = run_with_one_token(tmp_path, "rollout.group_size=4", "rollout.first_episodes=2")
    samples = summary["ledger"]["samples"]
    tokens = summary["ledger"]["tokens"]
    assert samples["settled"] > 0 and samples["settled"] % 2 == 0 and samples["filtered"] == 0
    assert tokens["settled"] == samples["settled"], "one token each"

    ended = tokens["generated"] - tokens["running"] - tokens["waiting"] - tokens["batched"]
    assert summary["broker"]["useful_share"] == pytest.approx(tokens["trained"] / ended)


def test_slow_episodes_are_hedged_on_the_other_server(tmp_path: Path) -> None:
    """Their times differ by more than what a busy machine makes an episode wait."""
    settings = ("rollout.hooks=[{hedging: {quantile: 0.8}}]", "env.options.mean_s=0.2", "env.options.sigma_s=0.3")
    summary = finish(start(tmp_path, *settings, "env.episodes_per_server=64", "steps=10"), tmp_path)
    check_books(summary, steps=10)
    broker = summary["broker"]
    assert broker["hedged"] > 0 and broker["hedges_won"] <= broker["hedged"]


@pytest.mark.parametrize("barrier", [True, pytest.param(False, marks=pytest.mark.docs)])
def test_the_per_turn_barrier_gives_lock_step_turns(barrier: bool, tmp_path: Path) -> None:
    """On each server all environments begin their step together; without the setting they do not."""
    options = (
        "env.name=tests.envs.lockstep:LockstepFamily",
        f"env.options.folder={tmp_path}",
        "env.options.turns=4",
        "env.max_turns=4",
        "env.options.mean_s=0.4",
        "env.options.sigma_s=0.02",
    )

    wanted = f"rollout.hooks={['turn_barrier'] if barrier else []}"
    process = start(tmp_path, *options, wanted, "rollout.alpha=0", "steps=4", "eval.tasks=0")
    check_books(finish(process, tmp_path), steps=4)
    begun, out_of_turn = steps_out_of_turn(tmp_path)

    assert begun >= 4 * 16 * 4
    assert out_of_turn == 0 if barrier else out_of_turn > begun / 4


def test_the_per_turn_barrier_with_cancels_failures_and_evaluations(tmp_path: Path) -> None:
    """Whatever ends an episode, the others go on: cancels, failures, hangs past a deadline."""
    overrides = (
        "rollout.hooks=[turn_barrier]",
        "rollout.redundant_groups=2",
        "rollout.redundant_episodes=1",
        "rollout.max_attempts=50",
        "rollout.episode_deadline_s=5",
        "env.step_deadline_s=1",
        "env.options.hang_probability=0.01",
        "env.options.fail_probability=0.02",
        "env.options.mean_s=0.02",
        "env.options.sigma_s=0.02",
    )

    summary = finish(start(tmp_path, *overrides), tmp_path)
    check_books(summary, steps=20)
    assert summary["ledger"]["samples"]["redundant"] > 0 and summary["eval"]["last"] is not None


def test_a_bad_name_ends_the_run_with_one_line(tmp_path: Path) -> None:
    output, _ = (process := start(tmp_path, "rollout.priority=freshes")).communicate(timeout=240)
    assert process.returncode != 0 and "did you mean 'freshest'" in output

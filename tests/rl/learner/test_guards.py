"""A statistic that guards judge by: what is chance, and what is not."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from algos.conformance import inputs_of
from algos.registry import make_loss
from rl.config.schema import load_config
from rl.learner.guards import StepGuards
from rl.learner.update import UpdateStats
from rl.observe.alarms import Alarms

RARE = 0.02


@pytest.mark.parametrize(
    ("branches", "older", "raised"),
    [(60, 0, []), (3000, 0, ["surprise"]), (3000, 29_000, ["surprise"]), (3000, 31_000, [])],
)
def test_rare_tokens_are_missed_by_few_draws_but_not_by_many(branches: int, older: int, raised: list[str]) -> None:
    """Of tokens that are certain but for `branches` of them, where another one has the chance RARE and is never drawn.

    Of 60 that happens to three runs in ten; of 3 000 it happens to none, but to those that are in a batch because they
    ended at once: they are the smaller part, beside `older` tokens.
    """
    logp = torch.zeros(10 * branches + older, dtype=torch.float64)
    entropy = torch.zeros_like(logp)
    logp[:branches] = math.log(1 - RARE)
    entropy[:branches] = -RARE * math.log(RARE) - (1 - RARE) * math.log(1 - RARE)

    inputs = inputs_of(logp, logp, torch.ones_like(logp), torch.zeros(len(logp), dtype=torch.int64))
    staleness = (torch.arange(len(logp)) >= 10 * branches).long()
    inputs = replace(inputs, entropy=entropy, staleness=staleness)
    stats = UpdateStats()
    stats.diagnostics.update(inputs, make_loss("ppo", {})(inputs), torch.arange(len(logp)))

    heard: list[str] = []
    alarms = Alarms(load_config(None, []).alarms, lambda name, _: heard.append(name))
    guards = SimpleNamespace(_alarms=alarms, _check=alarms.check, _log_ratio=1.0, _gap_grows=lambda gap: None, _step=0)
    guards._surprise = functools.partial(StepGuards._surprise, cast(Any, guards))
    StepGuards._at_equal_weights(cast(Any, guards), stats)
    assert heard == raised


@pytest.mark.parametrize(
    ("schedule", "step", "over", "stands"),
    [("linear", 5, 0.5, False), ("linear", 95, 0.0, True), ("linear", 5, 0.95, True), ("constant", 95, 0.95, False)],
)
def test_weights_may_stand_still_at_the_end_of_a_decay_by_steps_or_by_time(
    schedule: str, step: int, over: float, stands: bool
) -> None:
    config = load_config(None, ["steps=100", f"learner.schedule={schedule}", "seconds=60"])
    guards = SimpleNamespace(_config=config, _step=step, _first_step=0, _over=over)
    assert StepGuards._stands_by_schedule(cast(Any, guards)) is stands

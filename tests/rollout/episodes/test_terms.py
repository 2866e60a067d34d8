"""Episodes on terms of their own: fewer turns, shorter turns, another temperature of evaluation, a label."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rl.wire.messages import Generate, Generated, Trajectory
from rollout.episodes.environment import EpisodeTerms
from rollout.episodes.episode import run_episode
from tests.envs.harness import ticket
from tests.rollout.episodes.test_episode import Scripted, as_many_as_allowed, episode_context


class OnTerms(Scripted):
    def __init__(self, terms: EpisodeTerms) -> None:
        super().__init__()
        self.terms = terms


def played(terms: EpisodeTerms, *overrides: str, **fields: Any) -> tuple[Trajectory, list[Generate]]:
    asked: list[Generate] = []

    async def generate(request: Generate) -> Generated:
        asked.append(request)
        return await as_many_as_allowed(request)

    context = episode_context(generate, "generator.max_model_len=200", *overrides)
    trajectory = asyncio.run(run_episode(ticket(5, **fields), lambda: OnTerms(terms), None, context))
    return trajectory, asked


def test_terms_narrow_the_limits_of_the_run_and_name_the_episode() -> None:
    trajectory, asked = played(EpisodeTerms("lake", max_turns=3, max_tokens=2))
    assert (trajectory.label, trajectory.stop_reason, len(asked)) == ("lake", "max_turns", 3)
    assert [request.max_tokens for request in asked] == [2, 2, 2]


def test_terms_never_widen_them() -> None:
    trajectory, asked = played(EpisodeTerms("lake", max_turns=50, max_tokens=50))
    assert (trajectory.stop_reason, len(asked), asked[0].max_tokens) == ("max_turns", 9, 4)


@pytest.mark.parametrize(("kind", "temperature"), [("eval", 0.7), ("train", 1.0)])
def test_only_evaluations_have_a_temperature_of_their_own(kind: str, temperature: float) -> None:
    """The learner divides its logits by the run's one temperature."""
    _, asked = played(EpisodeTerms(eval_temperature=0.7), kind=kind, temperature=1.0)
    assert {request.temperature for request in asked} == {temperature}

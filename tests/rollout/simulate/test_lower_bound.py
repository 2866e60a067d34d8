"""The lower bound: each of its parts where that part decides, and that nothing undercuts it, whatever happens."""

from __future__ import annotations

import math

import pytest
from msgspec.structs import replace

from rollout.simulate.distributions import Constant, LogNormal
from rollout.simulate.lower_bound import lower_bound_s
from rollout.simulate.scenario import EnvServers, Generators, Scenario, TrainingCost, Work
from rollout.simulate.simulation import Simulation
from tests.rollout.simulate.test_simulation import CALM, GUARDED, STORM


def bound_and_time(scenario: Scenario) -> tuple[float, float]:
    """Seconds of the whole run: at least, and as simulated."""
    simulation = Simulation(scenario)
    result = simulation.run()
    return lower_bound_s(scenario, simulation.record.batches[: len(result.step_times)]), sum(result.step_times)


def test_a_learner_that_never_rests_decides() -> None:
    scenario = replace(CALM.with_broker(alpha=2.0), training=TrainingCost(step_s=1000.0, publish_s=10.0))
    bound, time_s = bound_and_time(scenario)
    assert bound == pytest.approx(6 * 1010.0) and time_s == pytest.approx(bound, rel=0.05)


def test_full_generators_decide() -> None:
    """64 groups of 4 of equal length on 2 generators of 8 seats: 16 rounds of seats a step, and no more."""
    engine = Generators(count=2, max_num_seqs=8, decode_base_s=0.02, decode_per_seq_s=0.001, prefill_tokens_per_s=1e9)
    work = Work(length=Constant(101))
    scenario = replace(
        CALM.with_broker(alpha=1.0, groups_per_batch=64), generators=engine, work=work, training=TrainingCost()
    )
    bound, time_s = bound_and_time(scenario)
    assert bound == pytest.approx(6 * 16 * 100 * (0.02 + 7 * 0.001)) and 1 <= time_s / bound < 1.1


def test_few_environments_decide() -> None:
    """16 episodes a step of one turn of 10 s, 2 at once."""
    work = Work(length=Constant(2), step_s=Constant(10))
    scenario = replace(CALM, work=work, servers=EnvServers(count=1, capacity=2), training=TrainingCost())
    bound, time_s = bound_and_time(scenario)
    assert bound == pytest.approx(6 * 8 * (10 + 0.02)) and 1 <= time_s / bound < 1.05


@pytest.mark.parametrize(("alpha", "share"), [(0.0, 1), (1.0, 2), (2.0, 3)])
def test_the_longest_chain_decides(alpha: float, share: int) -> None:
    """Two turns of 30 s each: alpha = 0 takes them in every step, S > 0 in every S + 1 steps."""
    work = Work(length=Constant(2), turns=Constant(2), step_s=Constant(30))
    scenario = replace(CALM.with_broker(alpha=alpha), work=work, training=TrainingCost(step_s=3.0))
    bound, time_s = bound_and_time(scenario)
    assert bound == pytest.approx(math.ceil(6 / share) * (60 + 2 * 0.02 + 3))
    assert time_s >= bound - 1e-6
    if alpha == 0:
        assert time_s == pytest.approx(bound, rel=0.01)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("patience", [1.0, math.inf])
@pytest.mark.parametrize("scenario", [CALM, STORM, GUARDED], ids=["calm", "storm", "guarded"])
def test_no_run_is_faster_than_its_bound(scenario: Scenario, patience: float, alpha: float) -> None:
    for seed in range(3):
        chosen = replace(scenario.with_broker(alpha=alpha, seed=seed, hold_patience=patience), seed=seed)
        bound, time_s = bound_and_time(chosen)
        assert time_s >= (1 - 1e-6) * bound > 0


def test_redundancy_that_drops_long_samples_is_measured_by_what_it_kept() -> None:
    """The drawn lengths' work is more than this run took, that of the kept ones is not."""
    work = Work(length=LogNormal(400, 1.2), max_tokens=8192)
    machine = Generators(count=1, max_num_seqs=4, decode_base_s=0.02, prefill_tokens_per_s=1e9)
    greedy = replace(CALM, work=work, generators=machine, training=TrainingCost()).with_broker(
        steps=30, alpha=0.0, redundant_episodes=4, redundant_groups=4, hold_patience=math.inf
    )
    bound, time_s = bound_and_time(greedy)
    drawn_s = 30 * 16 * (work.population_length() - 1) * 0.02 / 4

    assert bound <= time_s < drawn_s

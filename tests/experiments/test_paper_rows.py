"""The rows of the paper's table, small: directions that must hold, bounds, and the cost of scheduling."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.paper import admission, bounds, cost, environments, queueing, redundancy, rlvr, rows, split
from rollout.simulate.distributions import LogNormal
from rollout.simulate.scenario import Scenario, Work


def test_makespans_keep_the_bounds_and_approach_the_lower_one() -> None:
    """2 generators of 16 slots: at Q = 8192 within 5 % of max(work / slots, longest)."""
    few, many = (bounds.queue_line(samples, generators=2) for samples in (32, 8192))
    assert few["holds"] and many["holds"]
    assert many["over lower"] < 1.05


@given(
    samples=st.integers(1, 60),
    generators=st.integers(1, 3),
    mean=st.integers(1, 2000),
    sigma=st.floats(0.0, 2.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=40)
def test_no_makespan_exceeds_the_upper_bound(samples: int, generators: int, mean: int, sigma: float, seed: int) -> None:
    work = Work(length=LogNormal(mean, sigma), max_tokens=4096, prompt_tokens=1)
    line = bounds.queue_line(samples, generators, work, seed)
    assert line["holds"], line


def test_mean_steps_keep_the_bounds() -> None:
    assert all(line["holds"] for line in bounds.step_lines((0.5,), measured=2))


def test_environment_level_asynchrony_gains_more_with_more_spread() -> None:
    calm, wild = (environments.line(sigma, turns=4, environments=64)["speed-up"] for sigma in (1.0, 10.0))
    assert 1 < calm < wild


def test_queue_scheduling_beats_rounds() -> None:
    free = queueing.scenario(measured=10)
    rounds = rows.simulate(free.with_broker(redundant_groups=0, hooks=["batch_barrier"]))
    assert rounds.step_s / rows.simulate(free).step_s > 2


def test_redundancy_hides_hangs() -> None:
    alone, spare = (rows.simulate(redundancy.scenario(shape, measured=6)).step_s for shape in ((32, 8), (32, 10)))
    assert spare < alone / 2


def test_every_row_is_closed_by_its_parameters() -> None:
    for scenario in (rlvr.scenario(16, (2_000, 0.8), 0.5), split.scenario(16, 1.0), cost.scenario(10)):
        assert isinstance(scenario, Scenario) and scenario.until > scenario.warm_up


def test_the_papers_rows_run_with_their_kv_memory_as_the_limit() -> None:
    named = {setting.name.split()[0].strip(":,") for setting in admission.settings()}
    assert named >= {"RLVR", "alfworld", "swe", "queue", "replication", "environments", "redundant", "alpha", "best"}

    for setting in admission.settings():
        for each in (setting.baseline, *setting.choices):
            machine = each.generators
            assert (machine.kv_tokens, machine.kv_admission) == (rows.KV_TOKENS, "expected"), setting.name


def test_reserving_max_tokens_costs_what_reserving_the_expected_does_not() -> None:
    base, long = (rlvr.scenario(4, length, 0.5, prompts=8) for length in rlvr.LENGTHS.values())
    setting = admission.Setting("small", "", long, [long])
    seats, whole, expected = (admission.gain(setting, limit)[f"{limit} to_s"] for limit in admission.LIMITS)
    assert whole > 1.5 * expected and seats < 1.5 * expected

    assert rows.without_kv_limit(base.generators).max_num_seqs > rows.without_kv_limit(long.generators).max_num_seqs
    assert rows.without_kv_limit(long.generators).capacity > rows.KV_TOKENS


def test_a_gain_from_dropping_long_samples_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    line = {"setting": "x", "kept": 80.0, "drawn": 100.0, "speed-up": 2.0, "tokens x": 1.6}
    rows.verdict([line])
    assert "dropping long samples" in capsys.readouterr().out
    rows.verdict([line | {"kept": 99.0}])
    assert not capsys.readouterr().out


def test_scheduling_is_measured_per_sample() -> None:
    line = cost.measure(10, samples=300)
    assert line["samples"] >= 300
    assert line["broker_us"] > 0 and line["proxy_us"] > 0

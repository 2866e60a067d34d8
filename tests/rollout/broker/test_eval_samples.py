"""Several samples of each held-out task: avg@k and pass@k by the broker, against all subsets counted by hand."""

from __future__ import annotations

from itertools import combinations
from statistics import fmean

import pytest

from rl.config.schema import ConfigError, load_config
from rl.observe.intervals import over_tasks, pass_at, pass_rates, success_rates
from rl.wire.messages import Version
from rollout.broker.actions import EvalEpisode, EvalReport, IssueTicket
from rollout.broker.process import eval_metrics
from tests.rollout.broker.driver import Driver, of, rules


@pytest.mark.parametrize(("solved", "tried"), [(0, 4), (1, 4), (3, 4), (4, 4), (2, 7)])
def test_pass_at_k_is_the_share_of_subsets_in_which_one_solves_it(solved: int, tried: int) -> None:
    samples = [True] * solved + [False] * (tried - solved)
    for k in range(1, tried + 1):
        share = fmean(any(chosen) for chosen in combinations(samples, k))
        assert pass_at(k, solved, tried) == pytest.approx(share)
    with pytest.raises(ValueError, match="at least 9"):
        pass_at(9, solved, tried)


def test_no_more_samples_are_asked_of_a_task_than_it_has() -> None:
    rates = pass_rates([[1.0, 0.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0]])  # two samples of the second failed
    assert list(rates) == [1, 2, 3] and rates[3] == pytest.approx([1 - 4 / 10, 1.0])
    assert pass_rates([]) == {} and list(pass_rates([[1.0]] * 3)) == [1]


def test_a_task_is_sampled_several_times_with_seeds_of_their_own() -> None:
    driver = Driver(rules(eval_samples=3, eval_temperature=1.0, max_attempts=2), capacity=9)
    issued = of(driver.do(driver.core.eval_requested(Version(0, 0), 2, 0.0)) + driver.publish(0), IssueTicket)
    tickets = [action.ticket for action in issued if action.ticket.kind == "eval"]
    assert [ticket.task_index for ticket in tickets] == [0, 0, 0, 1, 1, 1], "side by side: they share a prompt"
    assert len({ticket.seed for ticket in tickets}) == 6

    # One sample fails and is tried again, as the sample that it was; another one has no reward.
    (retry,) = [each for each in of(driver.fail(tickets[1]), IssueTicket) if each.ticket.kind == "eval"]
    assert (retry.ticket.task_index, retry.ticket.attempt, retry.ticket.seed) == (0, 1, tickets[1].seed)
    driver.finish(tickets[0], 0, 1.0)
    driver.finish(tickets[2], 0, 0.0)
    driver.finish(tickets[3], 0, 0.0, unrewarded="judge raised TimeoutError")
    driver.finish(tickets[4], 0, 0.0)
    assert not of(driver.finish(tickets[5], 0, 0.0), EvalReport)
    (report,) = of(driver.finish(retry.ticket, 0, 0.0), EvalReport)

    assert [(each.task_index, each.sample) for each in report.episodes] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    assert (report.tasks, report.samples, report.failed) == (2, 3, 1)
    assert report.accuracy == pytest.approx((1 / 3 + 0) / 2), "each task counts once, however many were answered"
    assert report.rates["pass@1"][0] == pytest.approx(1 / 6) and report.rates["pass@2"][0] == pytest.approx(1 / 3)


def test_each_rate_of_an_evaluation_and_of_its_sets_has_its_interval_beside_it() -> None:
    solved = {"": [1.0, 0.0, 1.0, 1.0], "hard": [0.0, 0.0, 1.0, 0.0]}
    episodes = [
        EvalEpisode(task + 10 * bool(label), success, 0.0, 1, 5, 0.1, 3, label=label, sample=sample)
        for label, successes in solved.items()
        for task, sample, success in zip([0, 0, 1, 1], [0, 1, 0, 1], successes, strict=True)
    ]
    rates = success_rates((each.task_index, each.success) for each in episodes)
    columns = eval_metrics(EvalReport(Version(0, 3), 4, 0, 0.0, rates["avg"][0], 5.0, {3: 8}, 1.0, episodes, 2, rates))

    assert (columns["eval/accuracy"], columns["eval/pass@2"]) == (0.5, 0.75)
    assert (columns["eval/accuracy_low"], columns["eval/accuracy_high"]) == over_tasks([0.5, 1.0, 0.0, 0.5])[1:]
    assert (columns["eval/pass@2_low"], columns["eval/pass@2_high"]) == over_tasks([1.0, 1.0, 0.0, 1.0])[1:]
    assert (columns["eval/hard/accuracy"], columns["eval/hard/pass@2"]) == (0.25, 0.5)
    assert (columns["eval/hard/pass@2_low"], columns["eval/hard/pass@2_high"]) == over_tasks([0.0, 1.0])[1:]


def test_greedy_samples_are_all_the_same_and_refused() -> None:
    with pytest.raises(ConfigError, match=r"samples=4 with temperature=0 .*: set temperature"):
        load_config(None, ["eval.samples=4"])
    assert load_config(None, ["eval.samples=4", "eval.temperature=1"]).eval.samples == 4

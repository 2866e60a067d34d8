"""Limits and names of alarms: what a recipe may say of them, and what follows."""

from __future__ import annotations

import pytest

from rl.config.schema import ConfigError, load_config
from rl.observe.alarms import ALARMS, Alarms, RunAlarm, check_alarms, limit


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("alarms.off=[large-step]", "alarms.off: there is no alarm 'large-step'; did you mean 'large-steps'?"),
        ("alarms.off=[stale-batch]", "alarms.off='stale-batch': it ends the run, so it cannot be switched off"),
        ("alarms.off=[eval-on-train]", "raise alarms.limits.eval-on-train.share"),
        ("alarms.limits.larg-steps.kl=1", "alarms.limits: there is no alarm 'larg-steps'; did you mean 'large-steps'?"),
        ("alarms.limits.off-policy.es=1", "unknown limit 'alarms.limits.off-policy.es'; did you mean 'ess'?"),
        ("alarms.limits.off-policy.ess=1.5", "alarms.limits.off-policy.ess=1.5: it must lie between 0 and 1"),
        ("alarms.limits.entropy.nats=-1", "alarms.limits.entropy.nats=-1: it must lie between 0"),
        ("alarms.limits.entropy.steps=0", "alarms.limits.entropy.steps=0: it must lie between 1"),
        ("alarms.limits.clock.steps=2", "unknown limit 'alarms.limits.clock.steps'"),
        ("alarms.limits.clock.s=true", "alarms.limits.clock.s=True"),
        ("alarms.limits.clock.s=.nan", "alarms.limits.clock.s=nan"),
        ("alarms.limits.clock=3", "alarms.limits.clock=3"),
    ],
)
def test_what_no_alarm_has_is_refused_in_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_alarms(load_config(None, [override]).alarms)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_every_limit_may_keep_its_own_value() -> None:
    config = load_config(None, []).alarms
    for name, alarm in ALARMS.items():
        for each, own in alarm.limits.items():
            assert limit(config, name, each) == own.value
            assert own.least <= own.value <= own.most and own.meaning.endswith(".")
            check_alarms(load_config(None, [f"alarms.limits.{name}.{each}={own.value}"]).alarms)


def test_limits_are_as_they_were_when_each_was_a_field() -> None:
    values = {f"{name}.{each}": own.value for name, alarm in ALARMS.items() for each, own in alarm.limits.items()}

    before = {
        "weights-differ.nats": 0.1,
        "weights-differ.float32_nats": 1e-3,
        "log-ratio.nats": 0.15,
        "log-ratio.float32_nats": 3e-3,
        "log-ratio-grows.times": 10,
        "surprise.share": 0.05,
        "surprise.errors": 6,
        "entropy.nats": 1e-3,
        "off-policy.ess": 0.2,
        "off-policy.kl": 1,
        "large-steps.kl": 5e-3,
        "old-samples.versions": 8,
        "truncated.share": 0.9,
        "answers-cut.share": 0.2,
        "unreadable.share": 0.9,
        "invalid-actions.rise": 0.25,
        "task-type-never.groups": 16,
        "long-episodes-cut.times": 1.5,
        "failing-episodes.share": 0.3,
        "eval-incomplete.share": 0.3,
        "data-repeated.share": 0.9,
        "eval-on-train.share": 0.1,
        "slow-server.times": 3,
        "slow-server.s": 0.2,
        "slow-generator.times": 3,
        "slow-generator.s": 0.2,
        "learner-starved.share": 0.9,
        "learner-starved.s": 1,
        "clock.s": 5,
    }
    assert {name: values.get(name) for name in before} == before
    assert {value for name, value in values.items() if name.endswith(".steps")} == {3}


def test_an_alarm_waits_for_its_own_steps_and_one_that_is_off_tells_nobody() -> None:
    settings = ["alarms.limits.entropy.steps=2", "alarms.off=[clock]"]
    told: list[str] = []
    alarms = Alarms(load_config(None, settings).alarms, lambda name, _: told.append(name))

    for name in ("entropy", "truncated", "clock"):
        for _ in range(2):
            alarms.check(name, True, "")
    assert told == ["entropy"]
    alarms.check("truncated", True, "")
    assert told == ["entropy", "truncated"], "three steps where nothing else is said"

    with pytest.raises(RunAlarm):
        alarms.check("stale-batch", True, "")

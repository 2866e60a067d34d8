"""Each fault of docs/silent-faults.md in a run of its own: its alarm is raised within three steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.museum import reward_faults as reward_faults
from tests.museum import slow_faults as slow_faults
from tests.museum.faults import FAULTS
from tests.museum.lab import Lab

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", FAULTS)
def test_the_alarm_is_raised_within_three_steps(model_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fault = FAULTS[name]
    lab = Lab(model_folder, *fault.overrides, steps=fault.steps)
    fault.spoil(lab, monkeypatch)
    lab.train(until=fault.alarm)

    steps = [step for step, alarm in lab.raised if alarm == fault.alarm]
    assert steps and steps[0] < fault.at + 3, lab.raised

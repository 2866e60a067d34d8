"""The configuration's section `alarms`. Their names and their limits' own values stand in `rl/observe/alarms.yaml`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rl.config.section import Section, Where


class AlarmsConfig(Section):
    where = "all processes"
    off: list[str] = Field(default_factory=list)
    """Alarms that are not raised, by name; those that end a run cannot be switched off."""
    limits: dict[str, dict[str, Annotated[float, Field(strict=True)]]] = Field(default_factory=dict)
    """Limits in the place of an alarm's own, such as `large-steps: {kl: 0.02}`."""
    exact: Annotated[float | None, Where("learner")] = Field(None, gt=0)
    """Largest difference in nats of any token under the weights that sampled it, such as 1e-4 for float32; null: not
    compared."""

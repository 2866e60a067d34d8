"""Alarms: what a run would otherwise suffer in silence, each by its name, with its likely cause and what to change.

One registry for every process, without torch. A guard stands where its data are and calls `Alarms.check`. An alarm that
stops ends the process with `RunAlarm`, and so the run; any other is told to the supervisor, and the run goes on.
Either is shown once, in terminal, report and wandb; `alarms.jsonl` and `summary.json` also say how often it came again.
docs/silent-faults.md says which fault which alarm finds. `alarms.yaml` has their texts and limits; a preflight without
torch checks what `alarms.limits` says of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from rl.config.alarms import AlarmsConfig
from rl.config.damage import read_lines
from rl.config.failures import EndsRun
from rl.config.section import LARGEST
from rl.config.tree import ConfigError, nearest

_NAME = "alarms.jsonl"
"""In the folder of a run: every alarm when it is raised, also of a run that goes on or was killed."""


class Limit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a guard compares with; least and most: between which another value may lie."""

    value: float
    meaning: str
    least: float = 0.0
    most: float = LARGEST


class Alarm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """watches: what must hold. cause: the likeliest. change: the field, or where to look.

    stops: the run ends. patient: only after so many wrong steps in a row as its limit `steps` says.
    """

    watches: str
    cause: str
    change: str
    stops: bool = False
    patient: bool = False
    own_limits: dict[str, Limit] = msgspec.field(default_factory=dict, name="limits")

    @property
    def limits(self) -> Mapping[str, Limit]:
        """The limits by name, as `alarms.limits` names them."""
        return {**self.own_limits, **(_PATIENCE if self.patient else {})}


_PATIENCE = {"steps": Limit(3, "Wrong steps in a row before the alarm is raised.", least=1)}
ALARMS = msgspec.yaml.decode(Path(__file__).with_suffix(".yaml").read_bytes(), type=dict[str, Alarm])


class RunAlarm(EndsRun, RuntimeError):
    """An alarm that stops the run."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(line(name, detail))
        self.name = name
        self.detail = detail


def line(name: str, detail: str) -> str:
    """What a user reads: the alarm, what was found, the likely cause, what to change."""
    alarm = ALARMS[name]
    return f"alarm {name}: {detail}; likely cause: {alarm.cause}; look at: {alarm.change}"


def limit(config: AlarmsConfig, alarm: str, name: str) -> float:
    """What the configuration says of this limit, or the alarm's own value."""
    return config.limits.get(alarm, {}).get(name, ALARMS[alarm].limits[name].value)


def check_alarms(config: AlarmsConfig) -> None:
    """Raises ConfigError for an alarm or a limit that is not there, or a value that a limit cannot have."""
    for alarm in config.off:
        known = _known("alarms.off", alarm)
        if known.stops:
            others = "".join(f"; raise alarms.limits.{alarm}.{name}" for name in known.limits)
            raise ConfigError(f"alarms.off={alarm!r}: it ends the run, so it cannot be switched off{others}")

    for alarm, values in config.limits.items():
        limits = _known("alarms.limits", alarm).limits
        for name, value in values.items():
            field = f"alarms.limits.{alarm}.{name}"
            if name not in limits:
                raise ConfigError(f"unknown limit {field!r}{nearest(name, list(limits))}")
            least, most = limits[name].least, limits[name].most
            if not least <= value <= most:
                raise ConfigError(f"{field}={value:g}: it must lie between {least:g} and {most:g}")


def _known(field: str, alarm: str) -> Alarm:
    if alarm not in ALARMS:
        raise ConfigError(f"{field}: there is no alarm {alarm!r}{nearest(alarm, list(ALARMS))}")
    return ALARMS[alarm]


class Alarms:
    """The alarms of one process; `tell(name, detail)` hears of each that does not stop, each time."""

    def __init__(self, config: AlarmsConfig, tell: Callable[[str, str], None]) -> None:
        self._config = config
        self._tell = tell
        self._in_a_row: Counter[str] = Counter()

    def limit(self, alarm: str, name: str) -> float:
        return limit(self._config, alarm, name)

    def check(self, name: str, wrong: bool, detail: str) -> None:
        """To be called once per step for a patient alarm. Raises RunAlarm if this is one that stops."""
        alarm = ALARMS[name]
        self._in_a_row[name] = self._in_a_row[name] + 1 if wrong else 0
        if not wrong or (alarm.patient and self._in_a_row[name] < self.limit(name, "steps")):
            return

        if alarm.stops:
            raise RunAlarm(name, detail)
        if name not in self._config.off:
            self._tell(name, detail)

    def check_above(self, name: str, limit: str, value: float, detail: str) -> None:
        """`check` of a value that may be as large as this limit of the alarm, and no larger."""
        self.check(name, value > self.limit(name, limit), detail)


class Clock:
    """How far the wall clock has jumped against the monotonic one since it was last read; both in seconds."""

    def __init__(self, wall_s: float, monotonic_s: float) -> None:
        self._offset_s = wall_s - monotonic_s

    def jump_s(self, wall_s: float, monotonic_s: float) -> float:
        jump_s = wall_s - monotonic_s - self._offset_s
        self._offset_s += jump_s
        return abs(jump_s)


class RaisedAlarm(msgspec.Struct, tag="raised"):
    """The first time. `step`: how many were trained by then; `who`: the process that saw it.

    `last_step` and `count`: of all times that this process raised it, as far as they are known.
    """

    time: float
    step: int
    name: str
    who: str
    detail: str
    cause: str
    change: str
    last_step: int
    count: int = 1

    @classmethod
    def of(cls, name: str, step: int, who: str, detail: str) -> RaisedAlarm:
        alarm = ALARMS[name]
        return cls(time.time(), step, name, who, detail, alarm.cause, alarm.change, step)

    def again(self, step: int) -> RaisedAgain:
        """Note that it was raised once more, by the same process."""
        self.last_step = step
        self.count += 1
        return RaisedAgain(self.name, step)

    @property
    def when(self) -> str:
        """When it was raised, for people."""
        again = f", {self.count} times up to step {self.last_step}" if self.count > 1 else ""
        return f"after step {self.step}{again}"


class RaisedAgain(msgspec.Struct, tag="again"):
    """A short line for each further time."""

    name: str
    step: int


def keep_alarm(run: Path, alarm: RaisedAlarm | RaisedAgain) -> None:
    """Raises OSError where the disk is full."""
    with (run / _NAME).open("ab") as file:
        file.write(msgspec.json.encode(alarm) + b"\n")


def read_alarms(run: Path) -> list[RaisedAlarm]:
    """One alarm for each name, in the order in which they were raised; a line that was being written is left out."""
    raised: dict[str, RaisedAlarm] = {}
    kinds: Any = RaisedAlarm | RaisedAgain
    for alarm in read_lines(run / _NAME, kinds):
        if isinstance(alarm, RaisedAlarm):
            raised[alarm.name] = alarm
        elif alarm.name in raised:
            raised[alarm.name].again(alarm.step)
    return list(raised.values())

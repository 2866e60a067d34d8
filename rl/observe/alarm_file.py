"""`<run>/alarms.jsonl`: every alarm when it is raised, for reports, also of a run that goes on or was killed."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from rl.config.damage import readable
from rl.observe.alarms import ALARMS

_NAME = "alarms.jsonl"


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
    path = run / _NAME
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    raised: dict[str, RaisedAlarm] = {}
    for alarm in readable(lines, RaisedAlarm | RaisedAgain):
        if isinstance(alarm, RaisedAlarm):
            raised[alarm.name] = alarm
        elif alarm.name in raised:
            raised[alarm.name].again(alarm.step)
    return list(raised.values())

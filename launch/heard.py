"""What a process may say to the supervisor: of itself alone, and what its role has to say."""

from __future__ import annotations

import json

from launch.plan import ProcessSpec
from rl.observe.alarms import ALARMS
from rl.wire.messages import AlarmRaised, Done, Fatal, Heartbeat, Message, Metrics, ProtocolError, Register

_TRAINED = {"version/timeline", "time/over", "time/step"}
"""Columns that a row of a trained batch has, beside `train/loss`."""
_ALLOWED: dict[type, set[str]] = {Metrics: {"learner", "broker"}, Done: {"learner", "broker"}}
_HEARD = (Heartbeat, Register, Fatal, Done, AlarmRaised, Metrics)


def check_said(message: Message, spec: ProcessSpec, incarnation: int) -> None:
    """Raises ProtocolError for what the process of this plan would not say."""
    what = type(message).__name__
    if spec.role not in _ALLOWED.get(type(message), {spec.role}):
        raise ProtocolError(f"{what} of {spec.name}, which has none to tell")

    own = {"role": spec.role, "index": spec.index, "incarnation": incarnation, "who": spec.name}
    if not isinstance(message, _HEARD) or any(getattr(message, name, mine) != mine for name, mine in own.items()):
        raise ProtocolError(f"{what} in the name of another than {spec.name}")

    if wrong := _wrong(message):
        raise ProtocolError(f"{what} of {spec.name}: {wrong}")


def _wrong(message: Message) -> str:
    match message:
        case AlarmRaised(name=name) if name not in ALARMS:
            return f"there is no alarm {name[:60]!r}"
        case Metrics(step=step, values=values):
            missing = sorted(_TRAINED - values.keys()) if "train/loss" in values else []

            if step < 0 or missing:
                return f"a row of step {step} without {missing}"

        case Done(report=report):
            try:
                is_report = isinstance(json.loads(report), dict)
            except (ValueError, RecursionError):
                is_report = False
            return "" if is_report else "its report is no JSON object"
    return ""

"""The supervisor hears of each process what its role has to say, of itself alone."""

from __future__ import annotations

import contextlib
import random
from types import SimpleNamespace
from typing import Any

import pytest

from launch.heard import check_said
from launch.plan import ProcessSpec
from launch.supervisor import Supervisor
from rl.wire.messages import (
    AlarmRaised,
    Done,
    Fatal,
    Heartbeat,
    Message,
    Metrics,
    ProtocolError,
    Register,
)
from tests.any_message import KINDS, any_message

LEARNER = ProcessSpec("learner", 0, "rl.learner.process")
SERVER = ProcessSpec("env_server", 1, "envs.server")
ROW = {"train/loss": 0.1, "train/reward": 0.5, "version/timeline": 0.0, "time/over": 0.0, "time/step": 1.0}
HEARD = (Heartbeat, Register, Fatal, AlarmRaised, Metrics, Done)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (LEARNER, Metrics(3, ROW)),
        (LEARNER, Done("learner", b"{}")),
        (LEARNER, AlarmRaised("learner.0", "no-diversity", "why")),
        (SERVER, AlarmRaised("env_server.1", "no-diversity", "why")),
        (SERVER, Heartbeat("env_server", 1, 2, 5, True)),
        (SERVER, Fatal("env_server", 1, "why")),
    ],
)
def test_what_a_process_has_to_say_is_heard(spec: ProcessSpec, message: Message) -> None:
    check_said(message, spec, 2)


@pytest.mark.parametrize(
    ("spec", "message", "why"),
    [
        (LEARNER, Metrics(3, {"train/loss": 0.1}), "without \\['time/over', 'time/step', 'version/timeline'"),
        (LEARNER, Metrics(-1, ROW), "a row of step -1"),
        (SERVER, Metrics(3, ROW), "which has none to tell"),
        (LEARNER, AlarmRaised("learner.0", "no such alarm", ""), "there is no alarm 'no such alarm'"),
        (LEARNER, AlarmRaised("broker.0", "no-diversity", ""), "in the name of another"),
        (LEARNER, Done("broker", b"{}"), "in the name of another"),
        (LEARNER, Done("learner", b"no json"), "no JSON object"),
        (LEARNER, Done("learner", b"[]"), "no JSON object"),
        (LEARNER, Done("learner", b"[" * 100_000), "no JSON object"),
        (SERVER, Done("env_server", b"{}"), "which has none to tell"),
        (SERVER, Fatal("learner", 0, "why", ends_run=True), "in the name of another"),
        (SERVER, Heartbeat("env_server", 1, 1, 5, True), "in the name of another"),
        (SERVER, Register("env_server", 0, 2), "in the name of another"),
    ],
)
def test_what_it_has_not_is_refused(spec: ProcessSpec, message: Message, why: str) -> None:
    with pytest.raises(ProtocolError, match=why):
        check_said(message, spec, 2)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_whatever_is_said_is_heard_or_refused(kind: type[Message]) -> None:
    pick = random.Random(kind.__name__)
    for spec in (LEARNER, SERVER):
        for _ in range(50):
            message = any_message(kind, pick)
            with contextlib.suppress(ProtocolError):
                check_said(message, spec, 2)
                assert kind in HEARD, f"{kind.__name__} is nothing for the supervisor"


class Children(dict[tuple[str, int], Any]):
    def __iter__(self) -> Any:
        raise AssertionError("all of them are looked at")

    values = items = keys = __iter__


def test_a_sender_is_found_without_a_look_at_the_others() -> None:
    """A run has a thousand generators, and each says something twice a second."""
    children = Children({("generator", i): SimpleNamespace(identity=b"generator.%d.2.mac" % i) for i in range(1024)})
    supervisor: Any = SimpleNamespace(_children=children)
    assert Supervisor._child(supervisor, b"generator.700.2.mac") is children["generator", 700]
    for stranger in (
        b"generator.700.1.mac",
        b"generator.1024.2.mac",
        b"generator",
        b"",
        b"\xff.1.2",
        b"learner.x.2.mac",
    ):
        with pytest.raises(ProtocolError, match="stranger"):
            Supervisor._child(supervisor, stranger)

"""Names: who has the CURVE key, or somebody's name, cannot speak as another."""

from __future__ import annotations

import os

import pytest

from rl.wire.messages import ProtocolError
from rl.wire.names import Names


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FRESCO_NAME", "FRESCO_NAMES_KEY"):
        monkeypatch.delenv(name, raising=False)


def given(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Names:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Names.given()


def test_a_process_proves_its_own_name(environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    supervisor = Names.made()
    learner = given(supervisor.environment("learner", 1, 3), monkeypatch)
    name = learner.of("learner", 1, 3)
    assert name.startswith(b"learner.1.3.") and supervisor.sender(name, "learner", 2) == (1, 3)
    with pytest.raises(ProtocolError, match="stranger"):
        supervisor.sender(name, "learner", 1)
    with pytest.raises(ProtocolError, match="stranger"):
        supervisor.sender(name, "generator", 2)


def test_an_environment_server_knows_its_own_name_and_no_other(
    environment: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it starts inherits not even that."""
    supervisor = Names.made()
    server = given(supervisor.environment("env_server", 0, 2), monkeypatch)
    assert supervisor.sender(server.of("env_server", 0, 2), "env_server", 1) == (0, 2)
    assert "FRESCO_NAME" not in os.environ and "FRESCO_NAMES_KEY" not in os.environ
    for role, index, incarnation in [("env_server", 0, 1), ("env_server", 1, 2), ("learner", 0, 2)]:
        with pytest.raises(ProtocolError, match="not proven"):
            supervisor.sender(server.of(role, index, incarnation), role, 2)


@pytest.mark.parametrize("how", ["without", "of another", "of another run", "cut", "longer"])
def test_a_name_with_another_proof_is_a_strangers(how: str) -> None:
    names = Names.made()
    proven = names.of("learner", 0, 0)
    forged = {
        "without": b"learner.0.0",
        "of another": b"learner.0.0." + names.of("learner", 0, 1).rpartition(b".")[2],
        "of another run": Names.made().of("learner", 0, 0),
        "cut": proven[:-1],
        "longer": proven + b"0",
    }[how]
    with pytest.raises(ProtocolError, match="stranger"):
        names.sender(forged, "learner")
    assert names.sender(proven, "learner") == (0, 0)

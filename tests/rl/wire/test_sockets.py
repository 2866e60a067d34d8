"""Who may speak: the holders of the run's key, in their own names, in frames of a bounded size."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from experiments.bench._inbox import receive_from
from rl.wire import sockets
from rl.wire.messages import BatchRequest, ProtocolError
from rl.wire.names import Names
from rl.wire.run import RunFile
from rl.wire.sockets import Connection, make_curve_key, open_socket, send
from tests.conftest import MakeRun


@pytest.fixture
def context() -> Iterator[zmq.SyncContext]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_only_the_holder_of_the_run_s_key_is_heard(
    make_run: MakeRun, context: zmq.SyncContext, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(f"network.transport={transport}")
    assert (run.folder / "curve.key").stat().st_mode & 0o777 == 0o600
    steps = open_socket(zmq.ROUTER, run, "steps", bind=True, context=context)

    def speak(step: int) -> None:
        send(
            open_socket(zmq.DEALER, run, "steps", identity=b"learner.0.%d" % step, context=context), BatchRequest(step)
        )

    key = (run.folder / "curve.key").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(sockets, "_secure", lambda *_, server: None)  # a stranger who has found the socket
        speak(1)
    make_curve_key(run.folder)  # another run's
    speak(2)
    (run.folder / "curve.key").write_bytes(key)
    speak(3)

    assert steps.poll(60_000) and receive_from(steps) == (b"learner.0.3", BatchRequest(3))
    assert not steps.poll(300)


def test_a_frame_beyond_the_limit_costs_its_sender_the_connection(
    make_run: MakeRun, context: zmq.SyncContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "MAX_FRAME_BYTES", 1 << 20)
    run: RunFile = make_run()
    steps = open_socket(zmq.ROUTER, run, "steps", bind=True, context=context)
    large, small = (
        open_socket(zmq.DEALER, run, "steps", identity=b"learner.0.%d" % i, context=context) for i in range(2)
    )
    large.send(bytes(2 << 20))
    send(small, BatchRequest(1))
    assert steps.poll(60_000) and receive_from(steps) == (b"learner.0.1", BatchRequest(1))
    assert not steps.poll(300)


@pytest.mark.parametrize(
    "peer", [b"learner.0.0", b"env_server.2.0", b"env_server.0", b"env_server.-1.0", b"\0abcd", b""]
)
def test_a_stranger_is_refused(peer: bytes) -> None:
    assert Names().sender(b"env_server.1.12", "env_server", 2) == (1, 12)
    with pytest.raises(ProtocolError, match="stranger"):
        Names().sender(peer, "env_server", 2)


def test_a_context_that_is_destroyed_ends_a_monitor_before_its_reader(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round an event that comes between them stops ZeroMQ's thread, and `close` waits for it for ever."""
    read_on = []
    close = Connection.close

    def noted(self: Connection, linger: int | None = None) -> None:
        read_on.append(not self.news.closed)
        close(self, linger)

    run = make_run()
    context = zmq.Context()
    # pyzmq closes the sockets of a context in any order.
    opened = [open_socket(zmq.DEALER, run, "steps", context=context) for _ in range(20)]
    monkeypatch.setattr(Connection, "close", noted)
    context.destroy(linger=0)

    assert read_on == [True] * len(opened)

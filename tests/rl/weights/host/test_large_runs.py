"""However many engines a run has, each of their ranks reads its weights, also from a machine that joined late."""

from __future__ import annotations

import pytest

from launch.launcher.members import Members
from rl.weights.channel import WeightsError
from rl.wire.messages import Version
from tests.conftest import MakeRun
from tests.rl.weights.host.test_ends import publish, read, receiver_of, run_for, sender_of


@pytest.mark.parametrize(
    ("transport", "generators", "tensor_parallel"),
    [("shm", 1, 1), ("shm", 300, 1), ("shm", 1000, 1), ("shm", 100, 4), ("zmq", 300, 1)],
)
def test_the_last_of_all_readers_leases_what_was_written(
    make_run: MakeRun, transport: str, generators: int, tensor_parallel: int
) -> None:
    """The others stand in the table of the slots as they really are; this one comes to them as an engine does."""
    count = [f"generator.count={generators}", f"generator.tensor_parallel={tensor_parallel}"]
    run = run_for(make_run, transport, *count)
    writer = sender_of(run)
    writer.open()
    assert writer._slots is not None
    *others, name = [f"generator-{index}-{rank}" for index in range(generators) for rank in range(tensor_parallel)]
    with writer._slots.lock() as table:
        rows = {table.register(other, 0) for other in others}
    assert len(rows) == generators * tensor_parallel - 1

    last = receiver_of(run, name)
    last.open(10)
    publish(writer, 0)
    assert read(last, 0) == (0, writer.checksum(Version(0, 0), 1))

    last.lease(Version(0, 0), 10)
    for n in range(1, 6):
        publish(writer, n)
    assert last.receipt() and last.release(), "its lease keeps the writer off its slot, wherever it stands in the table"
    assert read(last, 5)[0] == 5
    last.close()
    writer.close()


@pytest.mark.parametrize(("generators", "tensor_parallel"), [(1, 1), (6, 2)])
def test_there_is_room_for_the_planned_readers_and_for_those_of_late_machines(
    make_run: MakeRun, generators: int, tensor_parallel: int
) -> None:
    """Of two machines one is lost, and three come: each engine that moves asks as its next incarnation."""
    count = [f"generator.count={generators}", f"generator.tensor_parallel={tensor_parallel}"]
    writer = sender_of(run_for(make_run, "zmq", *count))
    writer.open()
    assert writer._slots is not None
    members = Members(2, 10.0, {})
    for agent in (b"one", b"two"):
        members.join(0.0, agent, []).sees = True

    def register(index: int, incarnation: int) -> None:
        assert members.assign(f"generator.{index}.{incarnation}", 0) is not None
        assert writer._slots is not None
        with writer._slots.lock() as table:
            for rank in range(tensor_parallel):
                table.register(f"generator-{index}-{rank}", incarnation)

    for index in range(generators):
        register(index, 0)

    members.heard(9.0, b"two")
    (gone,) = members.lost(11.0)
    for agent in (b"three", b"four", b"five"):
        members.join(12.0, agent, []).sees = True
    for name in gone.holds:
        register(int(name.split(".")[1]), 1)

    with writer._slots.lock() as table, pytest.raises(WeightsError, match="one more than the"):
        table.register(f"generator-{generators}-0", 0)
    writer.close()

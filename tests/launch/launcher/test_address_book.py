"""Who is told what: the state machine by itself."""

from __future__ import annotations

from launch.launcher.address_book import AddressBook
from rl.wire.messages import PeerDied, PeerListens, Register

BROKER = {"tickets": "tcp://10.0.0.1:1", "steps": "tcp://10.0.0.1:2"}


def server(index: int = 0) -> tuple[bytes, Register]:
    return b"env_server.%d.0" % index, Register("env_server", index, 0, needs=["tickets", "frontend"])


def broker(incarnation: int = 0, listens: dict[str, str] | None = None) -> tuple[bytes, Register]:
    name = b"broker.0.%d" % incarnation
    return name, Register("broker", 0, incarnation, BROKER if listens is None else listens)


def tickets(incarnation: int, endpoint: str) -> PeerListens:
    return PeerListens("broker", 0, incarnation, {"tickets": endpoint})


def test_who_looks_for_a_socket_is_told_of_it_and_of_no_other() -> None:
    book = AddressBook()
    assert book.register(*broker()) == []
    assert book.register(b"generator.0.0", Register("generator", 0, 0)) == []
    assert book.register(*server()) == [(b"env_server.0.0", tickets(0, BROKER["tickets"]))]


def test_who_looked_first_is_told_when_it_is_bound() -> None:
    book = AddressBook()
    for index in range(2):
        assert book.register(*server(index)) == []
    assert book.register(*broker(listens={})) == []
    assert book.register(*broker()) == [(b"env_server.%d.0" % i, tickets(0, BROKER["tickets"])) for i in range(2)]


def test_what_a_process_looks_for_later_is_told_then() -> None:
    book = AddressBook()
    book.register(*broker())
    assert book.register(b"learner.0.0", Register("learner", 0, 0)) == []
    told = PeerListens("broker", 0, 0, {"steps": BROKER["steps"]})
    assert book.register(b"learner.0.0", Register("learner", 0, 0, needs=["steps"])) == [(b"learner.0.0", told)]


def test_who_registers_again_is_told_all_again_and_nobody_else_is() -> None:
    """Its connection broke: what was on its way to it is lost."""
    book = AddressBook()
    book.register(*broker())
    book.register(*server(1))
    book.died({b"generator.0.0": PeerDied("generator", 0, 0)})
    told = book.register(*server())
    peer = b"env_server.0.0"
    assert told == [(peer, PeerDied("generator", 0, 0)), (peer, tickets(0, BROKER["tickets"]))]
    assert book.register(*server()) == told
    assert [to for to, _ in book.register(*broker())] == [b"broker.0.0"]


def test_nobody_is_sent_to_a_dead_process_and_its_successor_is_told_of() -> None:
    book = AddressBook()
    book.register(*broker())
    book.register(*server())
    death = PeerDied("broker", 0, 0)
    assert book.died({b"broker.0.0": death}) == [(b"env_server.0.0", death)]
    assert book.register(*server(1)) == [(b"env_server.1.0", death)]  # of no socket

    elsewhere = {"tickets": "tcp://10.0.0.2:7"}
    told = book.register(*broker(1, elsewhere))
    assert told[0] == (b"broker.0.1", death)
    assert told[1:] == [(b"env_server.%d.0" % i, tickets(1, elsewhere["tickets"])) for i in range(2)]


def test_processes_that_die_together_are_not_told_of_each_other() -> None:
    book = AddressBook()
    for rank in range(2):
        book.register(b"learner.%d.0" % rank, Register("learner", rank, 0, {f"blobs.{rank}": "tcp://h:1"}, ["steps"]))
    book.register(*broker())
    deaths = {b"learner.%d.0" % rank: PeerDied("learner", rank, 0) for rank in range(2)}
    assert book.died(deaths) == [(b"broker.0.0", death) for death in deaths.values()]

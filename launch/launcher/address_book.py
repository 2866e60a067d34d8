"""Who listens where, and who has to be told: a state machine without sockets, which the supervisor holds.

Processes fill it when they register. A process is told of the sockets that it looks for, and of every death, and of
both again whenever it registers: its connection may have broken. Of a socket that nobody has bound, or whose process
is dead, it is told nothing until somebody binds it.
"""

from __future__ import annotations

from rl.wire.messages import Message, PeerDied, PeerListens, Register

Told = list[tuple[bytes, Message]]
"""What is to be sent, and to whom: the identity of a control socket."""


class AddressBook:
    """Peers are known by the identities of their control sockets, as `generator.0.2`."""

    def __init__(self) -> None:
        self._present: dict[bytes, Register] = {}  # what each has said last
        self._deaths: list[PeerDied] = []

    def register(self, peer: bytes, register: Register) -> Told:
        """A peer is there, or says more than before."""
        before = self._present.get(peer)
        self._present[peer] = register
        told: Told = [(peer, death) for death in self._deaths]
        told += [(peer, news) for other in self._present.values() if (news := _news(other, register))]
        if before is not None and before.listens == register.listens:
            return told

        others = [each for each in self._present if each != peer]
        return told + [(each, news) for each in others if (news := _news(register, self._present[each]))]

    def died(self, peers: dict[bytes, PeerDied]) -> Told:
        """These are dead, and those that remain are told so before anything else."""
        for peer in peers:
            self._present.pop(peer, None)
        self._deaths += peers.values()
        return [(peer, death) for peer in self._present for death in peers.values()]


def _news(listener: Register, seeker: Register) -> PeerListens | None:
    """What the one says that the other looks for."""
    listens = {name: endpoint for name, endpoint in listener.listens.items() if name in seeker.needs}
    return PeerListens(listener.role, listener.index, listener.incarnation, listens) if listens else None

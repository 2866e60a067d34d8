"""What a hook of the broker is: it is told what happens and proposes what may be done beside the rules F1-F5.

The core knows this interface, and meets no hook that the rules do not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from msgspec import Struct

from rl.config.hooks import Hook, Role
from rollout.broker.groups import Groups
from rollout.broker.records import Attempt, Group, State


class EndGroup(Struct, frozen=True):
    group: Group
    end: State


class StartCopy(Struct, frozen=True):
    """A second ticket for this running attempt's sample, on a seat that nothing new needs."""

    attempt: Attempt


class Suspend(Struct, frozen=True):
    """Give an environment server no tickets, or (`suspended=False`) tickets again."""

    server: int
    suspended: bool = True


Proposals = Iterable[EndGroup | StartCopy | Suspend]


class BrokerHook(Hook):
    """Every method may be left out. A hook reads the broker's parts and changes none: the core does what it proposes.

    A method may be a generator: each proposal has been carried out, where that was possible, when it goes on.
    What a hook keeps goes into the broker's log: its attributes, or what its `state` returns for its `restore`
    (`kept.py`).
    """

    role: ClassVar[Role] = "broker"

    def __init__(self, options: Any, groups: Groups) -> None:
        self.options = options
        self.groups = groups
        self.rules = groups.rules
        self.tickets = groups.tickets
        self.servers = groups.tickets.servers
        self.ledger = groups.tickets.ledger

    # ------------------------------------------------------------ what happens

    def issued(self, now: float, attempt: Attempt) -> Proposals:
        """A ticket for a new attempt at a sample has gone out."""
        return ()

    def finished(self, now: float, attempt: Attempt) -> Proposals:
        """An episode has brought its result."""
        return ()

    def failed(self, now: float, server: int) -> Proposals:
        """An episode has failed by this server's fault, as far as can be known."""
        return ()

    def server_joined(self, now: float, server: int) -> Proposals:
        """A new incarnation has joined, which has no tickets yet."""
        return ()

    def server_left(self, now: float, server: int, held: bool) -> Proposals:
        """A server is dead; `held` says whether it had episodes."""
        return ()

    def completed(self, now: float, group: Group) -> Proposals:
        """All results of a group, or of its first episodes, are in. It is not counted as ready, or widened, yet."""
        return ()

    def assembled(self, now: float) -> Proposals:
        """A batch has gone out, and what fits no later one has ended."""
        return ()

    # ------------------------------------------------------------ in every turn

    def event_begins(self, now: float) -> Proposals:
        """Every event ends in a turn, which begins here: nothing is assembled, admitted or issued yet."""
        return ()

    def event_ends(self, now: float) -> Proposals:
        """Everything new that there was a seat for has gone out."""
        return ()

    def may_assemble(self) -> bool:
        """Whether a batch that is complete may go out in this turn."""
        return True

    def may_admit(self) -> bool:
        """Whether new groups may begin in this turn, where F1 has room."""
        return True

    def next_deadline(self) -> float | None:
        """When a turn is needed though nothing happens."""
        return None

    def counts(self) -> dict[str, float]:
        """What it did, for the metrics (`broker/NAME`) and the closing report (`hooks`)."""
        return {}


class BrokerHooks(list[BrokerHook]):
    def __init__(self, hooks: Iterable[BrokerHook]) -> None:
        super().__init__(hooks)

        # By method of `BrokerHook`: those of the hooks that have one of their own.
        self._own: dict[object, list[Callable[..., Any]]] = {
            method: [getattr(hook, name) for hook in self if getattr(type(hook), name) is not method]
            for name, method in vars(BrokerHook).items()
            if callable(method)
        }

    def propose(self, method: Callable[..., Proposals], now: float, *what: object) -> Proposals:
        """Tell them what happens; their proposals, one by one."""
        for each in self._own[method]:
            yield from each(now, *what)

    def allow(self, method: Callable[[Any], bool]) -> bool:
        return all(may() for may in self._own[method])

    def deadlines(self) -> list[float | None]:
        return [hook.next_deadline() for hook in self]

    def counts(self) -> dict[str, float]:
        """What they did."""
        return {name: count for hook in self for name, count in hook.counts().items()}

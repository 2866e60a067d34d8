"""What a policy is: it is told what happens and proposes what may be done beside the rules F1-F5.

Policies are plug-ins: the core and its parts know this interface, and meet none that the rules leave off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from msgspec import Struct

from rl.config.plugins import load, make
from rollout.broker.groups import Groups
from rollout.broker.records import Attempt, Group, State
from rollout.broker.rules import Rules
from rollout.broker.tasks import DrawnTask, ShuffledTasks, TaskSource

_FOLDER = "rollout.broker.policies"


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


class SchedulingPolicy:
    """Every hook may be left out. A policy reads the broker's parts and changes none: the core does what it proposes.

    A hook may be a generator: each proposal has been carried out, where that was possible, when it goes on.
    """

    def __init__(self, groups: Groups) -> None:
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
        """A new incarnation, which has no tickets yet."""
        return ()

    def server_left(self, now: float, server: int, held: bool) -> Proposals:
        """It is dead; `held`: with episodes."""
        return ()

    def completed(self, now: float, group: Group) -> Proposals:
        """All results of a group, or of its first episodes, are in. It is not counted as ready, or widened, yet."""
        return ()

    def assembled(self, now: float) -> Proposals:
        """A batch has gone out, and what fits no later one has ended."""
        return ()

    # ------------------------------------------------------------ in every turn

    def event_begins(self, now: float) -> Proposals:
        return ()

    def event_ends(self, now: float) -> Proposals:
        """Everything new that there was a seat for has gone out."""
        return ()

    def may_assemble(self) -> bool:
        return True

    def may_admit(self) -> bool:
        return True

    def next_deadline(self) -> float | None:
        """When a turn is needed though nothing happens."""
        return None

    def counts(self) -> dict[str, float]:
        """For metrics and the closing report."""
        return {}


class Policies(list[SchedulingPolicy]):
    """Those that the rules ask for."""

    def __init__(self, groups: Groups) -> None:
        rules = groups.rules
        known = {
            "quarantine:Quarantine": rules.quarantine_failures > 0,
            "barrier:BatchBarrier": rules.batch_barrier,
            "filtering:ConstantGroups": rules.filter_constant_groups and rules.group_size > 1,
            "surplus:CancelSurplus": rules.surplus == "cancel",
            "hedging:Hedging": rules.hedge_quantile > 0,
        }
        super().__init__(load("policy", f"{_FOLDER}.{name}", {})(groups) for name, wanted in known.items() if wanted)

        # By hook of `SchedulingPolicy`: the methods of those policies that have one of their own.
        self._hooks: dict[object, list[Callable[..., Any]]] = {
            hook: [getattr(policy, name) for policy in self if getattr(type(policy), name) is not hook]
            for name, hook in vars(SchedulingPolicy).items()
            if callable(hook)
        }

    def propose(self, hook: Callable[..., Proposals], now: float, *what: object) -> Proposals:
        """Tell them what happens; their proposals, one by one."""
        for each in self._hooks[hook]:
            yield from each(now, *what)

    def allow(self, hook: Callable[[Any], bool]) -> bool:
        return all(may() for may in self._hooks[hook])

    def deadlines(self) -> list[float | None]:
        return [policy.next_deadline() for policy in self]

    def counts(self) -> dict[str, float]:
        """What they did; 0 where one is off."""
        names = ("quarantines", "filtered_groups", "filtered_successes", "settled_groups")
        counts: dict[str, float] = dict.fromkeys(names, 0)
        for policy in self:
            counts |= policy.counts()
        return counts


class Priority(Protocol):
    """Which group goes first: at issue, and in a batch. Lower goes first; ties go by issue number.

    F4 decides what is fresh enough, a priority only the order. Retries of failed members go before anything new
    whatever it says, and a group that waits for its turn too long still expires (F3).
    """

    def issue(self, task: DrawnTask) -> float:
        """Of a group that is about to be queued."""
        ...

    def consume(self, version: int, task: DrawnTask) -> float:
        """Of a finished group with v(group) = `version`."""
        ...


def make_priority(rules: Rules) -> Priority:
    """Raises ConfigError."""
    known = {"oldest": f"{_FOLDER}.priorities:Oldest", "freshest": f"{_FOLDER}.priorities:Freshest"}
    priority: Priority = make("rollout.priority", rules.priority, known, ("issue", "consume"))
    return priority


def make_task_source(rules: Rules) -> TaskSource:
    """Raises ConfigError."""
    known = {"shuffled": ShuffledTasks, "success": f"{_FOLDER}.curricula:SuccessWeighted"}
    arguments: dict[str, Any] = {"run_seed": rules.seed, "tasks": rules.train_tasks}
    if rules.curriculum == "success":
        arguments["group_size"] = rules.group_size
    arguments |= rules.curriculum_options
    needs = ("next", "ended", "snapshot", "restore")
    source: TaskSource = make("rollout.curriculum", rules.curriculum, known, needs, **arguments)
    return source

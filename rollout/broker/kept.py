"""The whole state of a broker as plain data, and back: what the write-ahead log begins with.

    kept = keep(intake)       # plain data for MessagePack, and the messages in it
    restore(fresh, kept)      # an intake that was just made of the same configuration, and now goes on as the other

Nothing that is read decides what is made of it. The **parts** of a broker (core, groups, hooks ...) are made anew, as
at every start, and only their values are filled in. **Records** (groups, samples, tickets ...) are of a closed list of
classes; each stands once, and whatever holds it has its number. Messages pass through the codec of the wire.
A curriculum, hook or priority that has `state` and `restore` keeps what it likes, as plain data. A hook without them
keeps its attributes.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple

from pydantic import BaseModel

from rl.observe.trace_events import Batched, Delivered, Issued, TakenBack, TicketEnded
from rl.wire.messages import Message, Version
from rollout.broker.actions import EpisodeOutcome, EvalEpisode, EvalReport
from rollout.broker.batches import Batches
from rollout.broker.built_in_hooks import Health
from rollout.broker.core import BrokerCore, Copies
from rollout.broker.deadlines import Deadlines
from rollout.broker.evaluation import Ending, EvalAttempt, Evaluation, Evaluations
from rollout.broker.group_state import Ages, Duration, FirstEpisodes
from rollout.broker.groups import Groups
from rollout.broker.history import History, Trained
from rollout.broker.hooks import BrokerHook, BrokerHooks
from rollout.broker.intake import Intake, Reorder
from rollout.broker.ledger import Ledger
from rollout.broker.records import Attempt, Group, Phase, Sample, State
from rollout.broker.servers import Server, Servers
from rollout.broker.statistics import Cut, Statistics, Tally
from rollout.broker.tasks import DrawnTask, TaskQueue
from rollout.broker.tickets import Tickets

_PARTS = (
    *(Intake, BrokerCore, Ledger, Servers, Tickets, Deadlines, Copies, Groups, FirstEpisodes, Ages, Duration),
    *(TaskQueue, Batches, Evaluations, History, Ending, BrokerHook),
)
_RECORDS = [Attempt, DrawnTask, EvalAttempt, Evaluation, Group, Health, Reorder, Sample, Server, Trained]
_TRACED = [Batched, Delivered, Issued, TakenBack, TicketEnded]
_STRUCTS = [Cut, EpisodeOutcome, EvalEpisode, EvalReport, Statistics, Tally, Version, *_TRACED]
_ENUMS = [Phase, State]
_CONTAINERS: list[Callable[[Any], Any]] = [list, tuple, set, deque]
_DICT, _RECORD, _STRUCT, _ENUM, _MESSAGE = range(len(_CONTAINERS), len(_CONTAINERS) + 5)

_PLAIN = {type(None), bool, int, float, str, bytes}
_CONTAINER_OF: dict[type, int] = {kind: tag for tag, kind in enumerate((list, tuple, set, deque))}
_RECORD_OF = {kind: (number, [each.name for each in dataclasses.fields(kind)]) for number, kind in enumerate(_RECORDS)}
_STRUCT_OF: dict[type, int] = {kind: number for number, kind in enumerate(_STRUCTS)}
_ENUM_OF: dict[type, int] = {kind: number for number, kind in enumerate(_ENUMS)}


class Kept(NamedTuple):
    state: Any
    messages: list[Message]


class CannotKeep(TypeError):
    """One line that names the plug-in or part, what it holds, and what to do."""


def keep(intake: Intake) -> Kept:
    """Between two events. Raises CannotKeep."""
    writer = _Writer()
    parts = []
    for part in _parts(intake):
        try:
            parts.append((type(part).__name__, writer.part(part)))
        except CannotKeep as error:
            what = f"{type(part).__name__} holds {error}"
            raise CannotKeep(f"{what}: give it state() and restore(state), with plain data for MessagePack") from None
    return Kept([parts, writer.write_records()], writer.messages)


def restore(intake: Intake, kept: Kept) -> None:
    """Raises ValueError where the state is that of another configuration."""
    written, records = kept.state
    reader = _Reader(records, kept.messages)
    parts = list(_parts(intake))
    names = [type(part).__name__ for part in parts]
    if names != [name for name, _ in written]:
        raise ValueError(f"the state has the parts {[name for name, _ in written]}, this broker {names}")

    for part, (_, values) in zip(parts, written, strict=True):
        if _has_state(part):
            part.restore(values)
            continue
        for name, value in values.items():
            own: Any = getattr(part, name, None)
            if _has_state(own):
                own.restore(value)
            else:
                _fill(part, name, own, reader.read(value))


def _parts(part: Any) -> Iterator[Any]:
    """A part and those that it holds, each once, in one order for one configuration."""
    seen: dict[int, Any] = {}

    def visit(value: Any) -> None:
        if isinstance(value, BrokerHooks):
            for each in value:
                visit(each)
        elif isinstance(value, _PARTS) and id(value) not in seen:
            seen[id(value)] = value
            for each in vars(value).values():
                visit(each)

    visit(part)
    yield from seen.values()


def _has_state(value: Any) -> bool:
    return hasattr(value, "state") and hasattr(value, "restore")


def _is_wiring(value: Any) -> bool:
    """Whether an attribute of a part is the same in every broker of this configuration."""
    is_plug_in = not callable(value) and not isinstance(value, dict)
    keeps_nothing = is_plug_in and getattr(value, "__dict__", None) == {}
    return keeps_nothing or isinstance(value, (*_PARTS, BrokerHooks, BaseModel, MethodType))


def _fill(part: Any, name: str, own: Any, value: Any) -> None:
    """Containers stay those of the part: with their default factory or greatest length, and for all who hold them."""
    if isinstance(own, dict | set):
        own.clear()
        own.update(value)
    elif isinstance(own, list | deque):
        own.clear()
        own.extend(value)
    else:
        setattr(part, name, value)


class _Writer:
    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._records: list[Any] = []
        self._numbers: dict[int, int] = {}  # by id

    def part(self, part: Any) -> Any:
        if _has_state(part):
            return part.state()
        written = {}
        for name, value in vars(part).items():
            if _has_state(value):
                written[name] = value.state()
            elif not _is_wiring(value):
                written[name] = self._attribute(value)
        return written

    def write_records(self) -> list[Any]:
        """All that was met, and those that they hold."""
        written: list[Any] = []
        while len(written) < len(self._records):
            record = self._records[len(written)]
            number, names = _RECORD_OF[type(record)]
            written.append([number, *(self._value(getattr(record, name)) for name in names)])
        return written

    def _attribute(self, value: Any) -> Any:
        """A part's own container may be of a kind of its own: it is filled again, not made."""
        if isinstance(value, dict):
            value = dict(value)
        elif isinstance(value, deque):
            value = list(value)
        return self._value(value)

    def _value(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if (tag := _CONTAINER_OF.get(kind)) is not None:
            values = [tag, *map(self._value, value)]
            return values if kind is not set else [tag, *sorted(values[1:], key=repr)]  # equal sets are written alike
        if kind is dict:
            return [_DICT, *(self._value(each) for item in value.items() for each in item)]

        if kind in _RECORD_OF:
            number = self._numbers.setdefault(id(value), len(self._records))
            if number == len(self._records):
                self._records.append(value)
            return [_RECORD, number]
        if (number := _STRUCT_OF.get(kind, -1)) >= 0:
            return [_STRUCT, number, *(self._value(getattr(value, name)) for name in kind.__struct_fields__)]
        if (number := _ENUM_OF.get(kind, -1)) >= 0:
            return [_ENUM, number, value.value]

        if isinstance(value, Message):
            self.messages.append(value)
            return [_MESSAGE, len(self.messages) - 1]
        raise CannotKeep(f"a {kind.__qualname__}")


class _Reader:
    def __init__(self, records: list[Any], messages: list[Message]) -> None:
        self._messages = messages
        kinds = [_RECORDS[number] for number, *_ in records]
        self._records = [kind.__new__(kind) for kind in kinds]  # first all of them: they hold each other
        for record, (_, *values) in zip(self._records, records, strict=True):
            for name, value in zip(_RECORD_OF[type(record)][1], values, strict=True):
                setattr(record, name, self.read(value))

    def read(self, value: Any) -> Any:
        if not isinstance(value, list):
            return value

        tag, *rest = value
        if tag < len(_CONTAINERS):
            return _CONTAINERS[tag](map(self.read, rest))
        if tag == _DICT:
            values = iter(map(self.read, rest))
            return dict(zip(values, values, strict=True))

        if tag == _RECORD:
            return self._records[rest[0]]
        if tag == _STRUCT:
            return _STRUCTS[rest[0]](*map(self.read, rest[1:]))
        if tag == _ENUM:
            return _ENUMS[rest[0]](rest[1])
        return self._messages[rest[0]]

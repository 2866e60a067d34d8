"""Messages between every process and the supervisor, over the socket `control`."""

from __future__ import annotations

from msgspec import Struct


class Register(Struct, frozen=True, tag="register"):
    """A process is there; said again whenever it binds a socket, or looks for one, that is not in it yet."""

    role: str
    index: int
    incarnation: int
    listens: dict[str, str] = {}  # endpoints of its sockets, by name
    needs: list[str] = []  # sockets of others


class PeerListens(Struct, frozen=True, tag="peer_listens"):
    """Sockets that the receiver looks for, and the process that has bound them."""

    role: str
    index: int
    incarnation: int
    listens: dict[str, str]


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """From a thread; `progress` is counted by the main loop, so a hung loop is noticed."""

    role: str
    index: int
    incarnation: int
    progress: int
    busy: bool
    stats: dict[str, float] = {}
    waits: dict[str, float] = {}  # seconds waited so far, by whom was waited for


class Spoken(Struct, frozen=True, kw_only=True):
    """What a process says once. It is repeated after a connection broke; `seq` numbers what one process has said."""

    seq: int = 0


class Metrics(Spoken, frozen=True, tag="metrics"):
    """A row for the tracker. `step` is the number of batches trained."""

    step: int
    values: dict[str, float]
    histograms: dict[str, list[float]] = {}


class Fatal(Spoken, frozen=True, tag="fatal"):
    """A process gives up: `message` is the one line, `detail` the traceback or state dump."""

    role: str
    index: int
    message: str
    detail: str = ""
    ends_run: bool = False  # `rl/config/failures.py`


class AlarmRaised(Spoken, frozen=True, tag="alarm"):
    """An alarm of `rl/observe/alarms.py`; of one that stops the run, before the exception."""

    who: str
    name: str
    detail: str


class Done(Spoken, frozen=True, tag="done"):
    """The learner has finished; or the broker's closing report (`report` is its JSON)."""

    role: str
    report: bytes = b""


class PeerDied(Struct, frozen=True, tag="peer_died"):
    """The supervisor has fenced this incarnation: it is dead for certain."""

    role: str
    index: int
    incarnation: int


class Stop(Struct, frozen=True, tag="stop"):
    """`save_first`, to the broker only: no further batch goes out, so that the learner saves what it has and ends."""

    reason: str
    save_first: bool = False

"""What a trace is made of: the events of a run's life, each told once by the process that knows it first.

A ticket's life, in order:

    Issued (broker) -> ResetBegan, ResetEnded (environment server)
      -> Requested (environment server) -> SamplingBegan, FirstToken, SamplingEnded (generator)
      -> Answered, StepBegan, StepEnded (environment server), once for each turn
      -> EpisodeEnded (environment server) -> Delivered, Batched, TicketEnded (broker)

Every issued ticket has exactly one TicketEnded, which may come before its episode has ended (it was cut). An event that
never came is missing: an episode that failed in its reset has no ResetEnded.

On disk an event is an array: a field that is added later goes to the end and has a default.
"""

from __future__ import annotations

from msgspec import Struct


class TraceHeader(Struct, frozen=True, array_like=True, tag=0):
    """The first record of a file: whose it is, and how its clock is read."""

    format: int
    role: str
    index: int
    incarnation: int
    pid: int
    wall: float
    """`time.time()` at the moment at which the file's clock (CLOCK_MONOTONIC, seconds) showed `monotonic`."""
    monotonic: float
    boot: str
    """Processes with the same one share CLOCK_MONOTONIC: their times can be compared exactly."""


class TraceEvent(Struct, frozen=True, array_like=True):
    """What a process tells."""


class StepEvent(TraceEvent, frozen=True):
    """An event that is told from `tracking.trace=steps` on."""


class TicketEvent(TraceEvent, frozen=True):
    """An event that is told with `tracking.trace=full` only."""


class OfTicket(TicketEvent, frozen=True):
    """An event in the life of one ticket."""

    ticket: int


# ---------------------------------------------------------------- tickets: told by the broker


class Issued(OfTicket, frozen=True, tag=1):
    """A ticket goes out to environment server `server`. Those of evaluations have group -1."""

    kind: str  # train | eval
    group: int
    sample: int
    task: int
    version: int  # gate: no older policy may answer
    attempt: int
    server: int


class Delivered(OfTicket, frozen=True, tag=2):
    """A ticket's trajectory has come and was found valid. It may be late: then its TicketEnded came before."""

    tokens: int  # generated, as the trajectory says


class Batched(TicketEvent, frozen=True, tag=3):
    """Batch `step` is assembled of the results of these tickets."""

    step: int
    tickets: tuple[int, ...]


class TicketEnded(OfTicket, frozen=True, tag=4):
    """What became of it: `trained`, `stale`, `filtered`, `settled`, `redundant`, `failed`, or `evaluated`."""

    end: str
    reason: str = ""  # of a failure


class TakenBack(OfTicket, frozen=True, tag=5):
    """A trained ticket is stale after all: the learner died, and trained its batch otherwise the second time."""


# ---------------------------------------------------------------- episodes: told by their environment server


class ResetBegan(OfTicket, frozen=True, tag=10):
    """The environment begins the task."""


class ResetEnded(OfTicket, frozen=True, tag=11):
    """The conversation is open."""


class Requested(OfTicket, frozen=True, tag=12):
    """A generation is asked for. A turn has more than one request if generators aborted it at a weight update."""

    turn: int  # from 1
    prompt_tokens: int


class Answered(OfTicket, frozen=True, tag=13):
    """The answer to the ticket's last request."""

    turn: int
    generator: int
    tokens: int  # of the answer
    finish_reason: str  # stop | length | abort | error


class StepBegan(OfTicket, frozen=True, tag=14):
    turn: int


class StepEnded(OfTicket, frozen=True, tag=15):
    turn: int
    reward: float


class EpisodeEnded(OfTicket, frozen=True, tag=16):
    """end: `done`, `length`, `context`, `max_turns` (a trajectory is delivered), `failed` or `cancelled`."""

    end: str
    turns: int  # begun
    tokens: int = 0  # generated; 0 without a trajectory
    reward: float = 0.0
    success: bool = False
    reason: str = ""  # of a failure, or for which deadline it was cut


# ---------------------------------------------------------------- told by the generator


class SamplingBegan(OfTicket, frozen=True, tag=20):
    """The engine has the request: the gate is open. `held_s`: how long the gate held it."""

    request: int  # the proxy's number of it
    held_s: float


class FirstToken(OfTicket, frozen=True, tag=21):
    request: int
    version: int


class SamplingEnded(OfTicket, frozen=True, tag=22):
    request: int
    tokens: int  # sampled, discarded ones included
    finish_reason: str  # stop | length | abort | error


class EngineState(TicketEvent, frozen=True, tag=23):
    """A sample of what the engine works on, some ten times a second while that changes."""

    running: int  # requests
    held: int  # requests that wait at the gate
    tokens: int  # sampled since the process began
    version: int


class LoadBegan(StepEvent, frozen=True, tag=24):
    timeline: int
    version: int


class LoadEnded(StepEvent, frozen=True, tag=25):
    timeline: int
    version: int
    seconds: dict[str, float] = {}  # by phase: pause, wait, copy, load
    error: str = ""


# ---------------------------------------------------------------- told by the learner


class SpanBegan(StepEvent, frozen=True, tag=30):
    """What the learner does from now on, until the SpanEnded of the same name. Spans nest."""

    name: str  # `wait broker`, `wait slot`, ... or a phase: prepare, train, publish, save, export
    step: int  # of the batch that is awaited or trained; its version n + 1 is published and saved in it


class SpanEnded(StepEvent, frozen=True, tag=31):
    name: str
    step: int


class Published(StepEvent, frozen=True, tag=32):
    """Version `version` can be read by generators."""

    timeline: int
    version: int


# ---------------------------------------------------------------- told by every process


class Wait(Struct, frozen=True, array_like=True):
    """One wait, from its begin until what was waited for came. step: the one it held up; -1: the process knows none."""

    seconds: float = 0.0
    whom: str = ""
    step: int = -1


class Pulse(StepEvent, frozen=True, tag=40):
    """What is told with a heartbeat, once a second at most. All numbers count since the process began."""

    busy: bool
    progress: int
    cpu_s: float
    waits: dict[str, float]  # seconds, by whom it waited for
    stats: dict[str, float]
    trace_s: float = 0.0
    """CPU seconds spent on writing the trace, from a sample of the calls."""
    longest: Wait = Wait()


# ---------------------------------------------------------------- told by the supervisor


class ProcessStarted(StepEvent, frozen=True, tag=50):
    role: str
    index: int
    incarnation: int


class ProcessDied(StepEvent, frozen=True, tag=51):
    """A process was fenced, and is replaced or ends the run."""

    role: str
    index: int
    incarnation: int
    how: str


class AlarmShown(StepEvent, frozen=True, tag=52):
    name: str
    detail: str


class RunEnded(StepEvent, frozen=True, tag=53):
    """reason: `finished`, `interrupted`, or the first cause of a failure."""

    reason: str

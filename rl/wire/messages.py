"""Everything that crosses a socket, as typed structs.

A trajectory, a batch part and a generator's reply carry mappings of columns, which `rl/wire/columns.py` declares.
"""

from __future__ import annotations

from collections.abc import Container
from itertools import compress

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace

from rl.observe.trace_events import Wait
from rl.wire.codec import Codec, pieces
from rl.wire.codec import Frames as Frames
from rl.wire.codec import ProtocolError as ProtocolError
from rl.wire.columns import COLUMNS, Accessor, Scope


class Version(Struct, frozen=True, order=True, array_like=True):
    """Policy version: `n` batches trained and published in `timeline` (every resume begins a new timeline)."""

    timeline: int
    n: int


# ---------------------------------------------------------------- the tokens of an episode: parts of several messages


class TokenColumns(Struct, frozen=True, kw_only=True):
    """A mapping of column to array, as `rl.wire.columns` declares them, with short names for the well-known ones."""

    columns: dict[str, np.ndarray]

    token_ids = Accessor[np.ndarray]()
    loss_mask = Accessor[np.ndarray]()
    logp_behavior = Accessor[np.ndarray]()
    policy_version = Accessor[np.ndarray]()


class Turn(Struct, frozen=True, array_like=True):
    """One generate -> step round. Positions index the token axis of its sequence."""

    start: int  # first generated token
    end: int  # one past the last generated token
    reward: float
    generate_s: float
    env_s: float
    finish_reason: str  # stop | length | abort
    generator: int
    number: int = 0  # its place in time among the turns of all sequences of the episode


class TokenSequence(TokenColumns, frozen=True, kw_only=True):
    """T tokens, prompt and observations included (token in, token out), and the turns that generated some of them.

    `columns` holds every column of a token (T, ...), a turn (len(turns), ...) and the sequence (1, ...).
    """

    turns: list[Turn]
    shared: int = 0  # tokens at the start that an earlier sequence holds as well, and trains: they are masked here

    @property
    def oldest_version(self) -> int:
        """v(sample), the smallest version that sampled one of its tokens (F3); -1 when nothing was generated."""
        unsigned = self.policy_version.view(np.uint32)  # so that -1, of what was not generated, is the largest one
        return int(unsigned.min(initial=2**32 - 1).astype(np.int32))


# ---------------------------------------------------------------- control: every process <-> supervisor


class OfProcess(Struct, frozen=True):
    """One process of the run: what is said by it, or of it."""

    role: str
    index: int
    incarnation: int


class Register(OfProcess, frozen=True, tag="register"):
    """A process is there; said again whenever it binds a socket, or looks for one, that is not in it yet."""

    listens: dict[str, str] = {}  # endpoints of its sockets, by name
    needs: list[str] = []  # sockets of others


class PeerListens(OfProcess, frozen=True, tag="peer_listens"):
    """Sockets that the receiver looks for, and the process that has bound them."""

    listens: dict[str, str]


class Heartbeat(OfProcess, frozen=True, tag="heartbeat"):
    """A sign of life from a thread of its own; `progress` is counted by the main loop, so a hung loop is noticed."""

    progress: int
    busy: bool
    stats: dict[str, float] = {}
    waits: dict[str, float] = {}  # seconds waited so far, by whom was waited for
    longest: Wait = Wait()


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
    """An alarm of `rl/observe/alarms.yaml`; of one that stops the run, before the exception."""

    who: str
    name: str
    detail: str


class Done(Spoken, frozen=True, tag="done"):
    """The learner has finished; or the broker's closing report (`report` is its JSON)."""

    role: str
    report: bytes = b""


class PeerDied(OfProcess, frozen=True, tag="peer_died"):
    """The supervisor has fenced this incarnation: it is dead for certain."""


class Stop(Struct, frozen=True, tag="stop"):
    """`save_first`, to the broker only: no further batch goes out, so that the learner saves what it has and ends."""

    reason: str
    save_first: bool = False


class StillCopying(Struct, frozen=True, tag="still_copying"):
    """To the broker: the files that a process needs before it can begin come nearer."""


# ---------------------------------------------------------------- tickets: broker <-> environment server


class Ticket(Struct, frozen=True, tag="ticket"):
    """The right to run one attempt at one sample. `kind="eval"` stands outside admission and ledger."""

    ticket_id: int
    sample_id: int  # place in the group: stable over attempts; eval tickets use -1
    group_id: int
    task_index: int  # index into the split's tasks
    version: Version  # gate: no older policy may answer (F2)
    attempt: int = 0
    kind: str = "train"  # train | eval
    deadline_s: float = 600.0
    seed: int = 0
    temperature: float = 1.0

    def gate(self, newest: int) -> Version:
        """F2: the oldest version that may answer a request, so that versions never go backwards inside an episode.

        newest: of the tokens in the request's history; -1: there are none."""
        return Version(self.version.timeline, max(self.version.n, newest))


class ServerHello(Struct, frozen=True, tag="server_hello"):
    server: int
    incarnation: int
    capacity: int  # seats: episodes at once
    seq: int = 0
    tickets: list[int] = []  # that it holds: whose episode runs, or whose end is not acknowledged


class CancelTickets(Struct, frozen=True, tag="cancel"):
    ticket_ids: list[int]


class AckTickets(Struct, frozen=True, tag="ack"):
    """The broker has taken the results of these tickets; the server forgets them."""

    ticket_ids: list[int]


class EndOfTicket(Struct, frozen=True):
    """What an environment server says of a ticket at its end, on either socket; `seq` numbers what it says."""

    server: int
    incarnation: int
    seq: int
    ticket_id: int


class TicketFailed(EndOfTicket, frozen=True, tag="failed"):
    reason: str
    turns: int = 0  # begun by then


class TicketCancelled(EndOfTicket, frozen=True, tag="cancelled"):
    """Answer to a cancel: the episode has ended and its generation was aborted."""

    turns: int = 0  # begun by then


NO_OPINION = "nobody has an opinion on its reward"
"""`Trajectory.unrewarded` where nothing has failed."""
LARGEST_REWARD = 1e6
"""In size, of an episode and of each of its turns."""


class Trajectory(EndOfTicket, frozen=True, tag="trajectory"):
    """One finished episode: its sequences in the order in which they began; several if its history forked."""

    sample_id: int
    group_id: int
    task_index: int
    kind: str
    timeline: int
    sequences: list[TokenSequence]
    reward: float
    success: bool  # as the environment said at its end
    stop_reason: str  # done | length | context | max_turns
    tokens_generated: int  # as the generators reported, aborted parts included
    seconds: float
    columns: dict[str, np.ndarray] = {}  # those of the sample, (1, ...) each
    info: dict[str, float] = {}  # numbers of the environment, averaged into metrics
    label: str = ""  # which environment of several it was
    unrewarded: str = ""  # why its reward is not known, if so: what stands in `reward` counts nowhere

    @property
    def sequence(self) -> TokenSequence:
        """The only one. Raises ValueError when there are several."""
        (sequence,) = self.sequences
        return sequence

    @property
    def turns(self) -> list[Turn]:
        """The turns of all sequences."""
        return [turn for sequence in self.sequences for turn in sequence.turns]


# ---------------------------------------------------------------- generation: env server <-> proxy <-> generator


class Generate(Struct, frozen=True, tag="generate"):
    """ADD: one single-response request. `session` (the ticket id) binds the turns of an episode."""

    request_id: int  # unique within the client
    session: int
    kind: str  # train | eval
    version: Version  # `Ticket.gate` (F2): held by the generator until it has loaded this version
    prompt_ids: np.ndarray  # (P,) int32, the whole context
    max_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: list[int]
    seed: int | None = None
    priority: int = 0  # lower first; the group's issue number
    known: int = 0  # tokens at the start of the prompt whose context columns the client has: the answer brings the rest
    stop: list[str] = []  # texts that end it, in an engine that reads text: the last token completes the first one
    stream: bool = False  # its client reads along: `Grown`


class Abort(Struct, frozen=True, tag="abort"):
    request_id: int


class Generated(TokenColumns, frozen=True, kw_only=True, tag="generated"):
    """The one answer to a request. An abort answers with what was generated until then.

    `columns` holds every column that generators make: of L tokens (L, ...), of a wider scope (1, ...). `context` holds
    the context columns of the prompt's tokens from `Generate.known` on, (P - known, ...). An answer that was cut off
    may lack it: then these columns say nothing of the L tokens either, and the next request asks again.
    """

    request_id: int
    session: int
    timeline: int
    finish_reason: str  # stop | length | abort | error
    tokens_generated: int  # everything the engine sampled for this request, discarded parts included
    generator: int
    context: dict[str, np.ndarray] = field(default_factory=dict)
    queued_s: float = 0.0
    generate_s: float = 0.0
    error: str = ""


Growth = dict[int, tuple[int, dict[str, np.ndarray]]]
"""What has grown, by request id: the place of the first new token in the response, and the columns of the new ones."""


class Grown(Struct, frozen=True, tag="grown"):
    """Generator -> proxy -> client: what requests with `stream` have grown by. Their answers hold it again."""

    requests: Growth


class ClientHello(Struct, frozen=True, tag="client_hello"):
    server: int
    incarnation: int


class GeneratorHello(Struct, frozen=True, tag="generator_hello"):
    generator: int
    incarnation: int
    kv_tokens: int  # KV cache capacity in tokens
    max_num_seqs: int
    max_model_len: int
    version: Version
    requests: list[int] = []  # that have no answer yet: what else the proxy had asked for is lost


class FirstToken(Struct, frozen=True, tag="first_token"):
    """Generator -> proxy -> broker: the first token of a session's first turn, by this version (F3)."""

    request_id: int
    session: int
    version: Version


class GeneratorStatus(Struct, frozen=True, tag="generator_status"):
    """Periodic, of running requests by id. What was not in `grown` is lost if the generator dies."""

    generator: int
    incarnation: int
    version: Version
    running: dict[int, int]  # tokens sampled
    grown: Growth = {}  # seldom, in bulk


class Usage(Struct, frozen=True, tag="usage"):
    """Proxy -> broker: tokens sampled for a training ticket, as the generator reported them."""

    session: int
    tokens: int
    lost: bool = False  # by a generator that died


class StillSampling(Struct, frozen=True, tag="still_sampling"):
    """Proxy -> broker: answers that run have grown. A batch that waits for a long one comes nearer."""


class ReportsLost(Struct, frozen=True, tag="reports_lost"):
    """Proxy -> broker: a connection broke, and with it perhaps reports of what live tickets have sampled."""


# ---------------------------------------------------------------- parsing: environment server <-> parsers


class ParserHello(Struct, frozen=True, tag="parser_hello"):
    """Answer to a ClientHello: the parser fits the tokenizer, and turns may come."""

    opener: str  # as `TurnParser` says


class ParseTurn(Struct, frozen=True, tag="parse_turn"):
    """Read this turn. Asked again, under its number, when its answer may be lost."""

    request_id: int  # unique within the client
    text: str  # with what the prompt had written of the turn
    tools: str  # JSON: what the turn could call


class TurnParsed(Struct, frozen=True, tag="turn_parsed"):
    """The parts of a parsed turn. If it could not be parsed, `failed` says why."""

    request_id: int
    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = []  # name, arguments as JSON text
    failed: str = ""


# ---------------------------------------------------------------- distillation: environment server <-> teacher


class ScoreTokens(Struct, frozen=True, tag="score_tokens"):
    """How likely are these tokens? Asked again, under its number, when its answer may be lost."""

    request_id: int  # unique within the client
    token_ids: np.ndarray  # (T,) int32, one whole sequence
    loss_mask: np.ndarray  # (T,) uint8, 1 at the tokens that are asked for


class TokensScored(Struct, frozen=True, tag="tokens_scored"):
    """Their log-probabilities under the teacher, each given all tokens before it."""

    request_id: int
    logp: np.ndarray  # (K,) float32


# ---------------------------------------------------------------- batches: broker <-> learner


class BatchRequest(Struct, frozen=True, tag="batch_request"):
    step: int


class BatchUnderway(Struct, frozen=True, tag="batch_underway"):
    """Tells a learner that waits that answers have begun, grown or ended since it was last told, or episodes have."""

    step: int


class Published(Struct, frozen=True, tag="published"):
    """The learner has trained `version.n` batches and published the weights."""

    version: Version


class EvalRequest(Struct, frozen=True, tag="eval_request"):
    """Evaluate the first `tasks` held-out tasks with policies not older than `version`."""

    version: Version
    tasks: int


class SaveRequest(Struct, frozen=True, tag="save_request"):
    """Ask the broker for its journal at this version, for a checkpoint."""

    version: Version
    newest: int = 0  # step of the checkpoint that there is already: batches before it are not trained again


class Journal(Struct, frozen=True, tag="journal"):
    version: Version
    state: bytes  # MessagePack


class SampleRow(Struct, frozen=True, array_like=True):
    """One sample of the batch, as every rank sees it (advantages need the whole batch)."""

    sample_id: int
    group_id: int
    reward: float
    tokens: int  # of all its sequences
    loss_tokens: int
    version: int  # v(sample)
    truncated: bool = False  # cut by a limit of length or turns instead of ending by itself
    turn_rewards: list[float] = []  # in the order of time; `reward` is their sum; empty: all of it is the last turn's
    turn_states: list[int] = []  # likewise, a hash of what each turn answers: equal where a group observed the same
    ticket_id: int = -1
    unrewarded: bool = False  # its reward is not known: it is not trained, and no baseline counts it


class BatchPart(TokenColumns, frozen=True, kw_only=True, tag="batch_part"):
    """One rank's part of the batch of `step`; `rows` lists the whole batch, ordered by sample id. Without rows:
    there is no such batch, and none after it, because the run is to be saved or its time is over.

    The sequences follow as one concatenation: `lengths[i]` tokens of the sample `members[i]`, an index into rows; a
    sample's stand side by side. `columns` has every carried column, an entry per token, turn or sequence; what a sample
    has once stands with each sequence.
    """

    step: int
    rank: int
    timeline: int
    rows: list[SampleRow]
    members: list[int]
    lengths: list[int]
    turn_starts: list[list[int]]  # per sequence: start of each generated span
    loss_tokens: int  # of the whole batch: the global normaliser
    turn_order: list[list[int]] = []  # per sequence: the place of each turn in time, in its row; empty: as they stand
    metrics: dict[str, float] = field(default_factory=dict)  # the broker's view of this batch (staleness, queue, waits)
    over: float = 0.0  # share of the run's time; from 1 on there is no batch after this one

    def entries(self) -> dict[Scope, list[int]]:
        """For each scope, how many entries each sequence has."""
        one_each = [1] * len(self.members)
        turns = [len(starts) for starts in self.turn_starts]
        return {"token": self.lengths, "turn": turns, "sequence": one_each, "sample": one_each}

    def of_rows(self, rows: Container[int]) -> BatchPart:
        """The sequences of these rows alone; `rows` and `loss_tokens` stay those of the whole."""
        kept = np.array([row in rows for row in self.members], bool)
        chosen = {scope: np.repeat(kept, np.array(counts, int)) for scope, counts in self.entries().items()}
        columns = {name: values[chosen[COLUMNS[name].scope]] for name, values in self.columns.items()}
        lists = {name: list(compress(getattr(self, name), kept)) for name in OF_SEQUENCES}
        return replace(self, columns=columns, **lists)


OF_SEQUENCES = ("members", "lengths", "turn_starts", "turn_order")
"""What a batch part has of each of its sequences, beside the columns."""


class LongBatchPart(Struct, frozen=True, tag="long_batch_part"):
    """A BatchPart with columns longer than a piece: `part` has the first piece of each, `rest` those that follow.

    Decoded, the pieces are views of their frames. Whoever receives it joins them once it knows the sender: nobody else
    makes it take memory for them.
    """

    part: BatchPart
    rest: dict[str, list[np.ndarray]]

    def joined(self) -> BatchPart:
        """Raises ProtocolError for pieces that are not of one column."""
        columns = dict(self.part.columns)
        for name, rest in self.rest.items():
            try:
                columns[name] = np.concatenate([columns[name], *rest], casting="no", dtype=columns[name].dtype)
            except (KeyError, ValueError, TypeError) as error:
                raise ProtocolError(f"pieces of column {name!r} that do not fit: {error}") from None
        return replace(self.part, columns=columns)


def in_frames(part: BatchPart) -> BatchPart | LongBatchPart:
    """As it is sent and written: itself, unless a column is longer than a piece (`rl.wire.codec`)."""
    cut = {name: pieces(values) for name, values in part.columns.items()}
    rest = {name: each[1:] for name, each in cut.items() if len(each) > 1}
    if not rest:
        return part
    return LongBatchPart(replace(part, columns={name: each[0] for name, each in cut.items()}), rest)


# ---------------------------------------------------------------- weights: learner <-> generator


class WeightNotice(Struct, frozen=True, tag="weight_notice"):
    """Learner -> generator: load this version, the newest."""

    version: Version
    probe_ids: list[int]


class RestNotice(Struct, frozen=True, tag="rest_notice"):
    """Learner -> generator: leave the device, which the learner needs, until the next WeightNotice."""


class WeightStatus(Struct, frozen=True, tag="weight_status"):
    """Generator -> learner, at every heartbeat and after each load (level-triggered)."""

    generator: int
    incarnation: int
    version: Version
    checksum: int | None = 0  # of the bytes received for `version`; None where no host sees them
    probe_ids: list[int] = []  # that the notice asked for; a newer version may have come with others
    probe_logp: list[float] = []  # log-probabilities of probe_ids[1:] under the loaded weights
    seconds: dict[str, float] = {}
    """Of the last load's phases. While generation goes on: `wait` for a version, and `copy`, which proves it. `pause`
    holds `drain`, until what `generator.on_update` waits for has ended, and `load` into the model."""
    loading: bool = False  # a load is under way, or the way to rest: `version` is what the engine had before
    resting: bool = False  # the engine has left the device
    error: str = ""


TicketMessage = Ticket | ServerHello | CancelTickets | AckTickets | TicketFailed | TicketCancelled | Trajectory
RequestMessage = (
    Generate
    | Abort
    | Generated
    | Grown
    | ClientHello
    | GeneratorHello
    | FirstToken
    | GeneratorStatus
    | Usage
    | StillSampling
    | ReportsLost
)
ParsingMessage = ParserHello | ParseTurn | TurnParsed
TeacherMessage = ScoreTokens | TokensScored
BatchMessage = (
    BatchRequest | BatchUnderway | Published | EvalRequest | SaveRequest | Journal | BatchPart | LongBatchPart
)
WeightMessage = WeightNotice | RestNotice | WeightStatus
SupervisorMessage = PeerDied | Stop | StillCopying
ControlMessage = Register | Heartbeat | Metrics | Fatal | AlarmRaised | Done | PeerListens | SupervisorMessage
Message = (
    TicketMessage | RequestMessage | ParsingMessage | TeacherMessage | BatchMessage | WeightMessage | ControlMessage
)


codec: Codec[Message] = Codec(Message)
encode = codec.encode
encode_all = codec.encode_all
decode = codec.decode
decode_all = codec.decode_all

"""Everything that crosses a socket, as typed structs.

A trajectory, a shard and a generator's reply carry mappings of columns, which `rl/core/columns.py` declares.
"""

from __future__ import annotations

import numpy as np
from msgspec import Struct

from rl.core.codec import Codec
from rl.core.codec import Frames as Frames
from rl.core.codec import ProtocolError as ProtocolError
from rl.core.columns import Accessor, Scope


class Version(Struct, frozen=True, order=True, array_like=True):
    """Policy version: `n` batches trained and published in `epoch` (every resume begins a new epoch)."""

    epoch: int
    n: int


class TokenColumns(Struct, frozen=True, kw_only=True):
    """A mapping of column to array, as `rl.core.columns` declares them, with short names for the well-known ones."""

    columns: dict[str, np.ndarray]

    token_ids = Accessor[np.ndarray]()
    loss_mask = Accessor[np.ndarray]()
    logp_behavior = Accessor[np.ndarray]()
    policy_version = Accessor[np.ndarray]()


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


class ServerHello(Struct, frozen=True, tag="server_hello"):
    server: int
    incarnation: int
    capacity: int  # episodes at once = tickets by credit
    seq: int = 0


class CancelTickets(Struct, frozen=True, tag="cancel"):
    ticket_ids: list[int]


class AckTickets(Struct, frozen=True, tag="ack"):
    """The broker has taken the results of these tickets; the server forgets them."""

    ticket_ids: list[int]


class TicketFailed(Struct, frozen=True, tag="failed"):
    server: int
    incarnation: int
    seq: int
    ticket_id: int
    reason: str
    turns: int = 0  # begun by then


class TicketCancelled(Struct, frozen=True, tag="cancelled"):
    """Answer to a cancel: the episode has ended and its generation was aborted."""

    server: int
    incarnation: int
    seq: int
    ticket_id: int
    turns: int = 0  # begun by then


class Turn(Struct, frozen=True, array_like=True):
    """One generate -> step round. Positions index the token axis of its sequence."""

    start: int  # first generated token
    end: int  # one past the last generated token
    reward: float
    generate_s: float
    env_s: float
    finish_reason: str  # stop | length | abort
    generator: int


class TokenSequence(TokenColumns, frozen=True, kw_only=True):
    """T tokens, prompt and observations included (token in, token out), and the turns that generated some of them.

    `columns` holds every column of a token (T, ...), a turn (len(turns), ...) and the sequence (1, ...).
    """

    turns: list[Turn]

    @property
    def first_version(self) -> int:
        """Version of the first generated token (F3); -1 when nothing was generated."""
        mask = self.loss_mask
        if not mask.size:
            return -1
        first = mask.argmax()
        return int(self.policy_version[first]) if mask[first] else -1


class Trajectory(Struct, frozen=True, tag="trajectory"):
    """One finished episode: its sequences in the order in which they began (today exactly one)."""

    server: int
    incarnation: int
    seq: int
    ticket_id: int
    sample_id: int
    group_id: int
    task_index: int
    kind: str
    epoch: int
    sequences: list[TokenSequence]
    reward: float
    stop_reason: str  # done | length | context | max_turns
    tokens_generated: int  # as the generators reported, aborted parts included
    seconds: float
    columns: dict[str, np.ndarray] = {}  # those of the sample, (1, ...) each
    info: dict[str, float] = {}  # numbers of the environment, averaged into metrics

    @property
    def sequence(self) -> TokenSequence:
        """The only one. Raises ValueError when there are several."""
        (sequence,) = self.sequences
        return sequence


# ---------------------------------------------------------------- generation: env server <-> proxy <-> generator


class Generate(Struct, frozen=True, tag="generate"):
    """ADD: one single-response request. `session` (the ticket id) binds the turns of an episode."""

    request_id: int  # unique within the client
    session: int
    kind: str  # train | eval
    version: Version  # gate F2: held by the generator until it has loaded this version
    prompt_ids: np.ndarray  # (P,) int32, the whole context
    max_tokens: int
    temperature: float
    top_p: float
    stop_token_ids: list[int]
    seed: int | None = None
    priority: int = 0  # lower first; the group's issue number


class Abort(Struct, frozen=True, tag="abort"):
    request_id: int


class Generated(TokenColumns, frozen=True, kw_only=True, tag="generated"):
    """The one answer to a request. An abort answers with what was generated until then.

    `columns` holds every column that generators make: of L tokens (L, ...), of a wider scope (1, ...).
    """

    request_id: int
    session: int
    epoch: int
    finish_reason: str  # stop | length | abort | error
    tokens_generated: int  # everything the engine sampled for this request, discarded parts included
    generator: int
    queued_s: float = 0.0
    generate_s: float = 0.0
    error: str = ""


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


class FirstToken(Struct, frozen=True, tag="first_token"):
    """Generator -> proxy -> broker: the first token of a session's first turn, by this version (F3)."""

    request_id: int
    session: int
    version: Version


class GeneratorStatus(Struct, frozen=True, tag="generator_status"):
    """Periodic: tokens sampled so far per running request (what is `lost` if the generator dies)."""

    generator: int
    incarnation: int
    version: Version
    running: dict[int, int]  # request id -> tokens sampled


class Usage(Struct, frozen=True, tag="usage"):
    """Proxy -> broker: tokens sampled for a training ticket, as the generator reported them."""

    session: int
    tokens: int
    lost: bool = False  # by a generator that died


# ---------------------------------------------------------------- batches: broker <-> learner


class BatchRequest(Struct, frozen=True, tag="batch_request"):
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


class Journal(Struct, frozen=True, tag="journal"):
    version: Version
    state: bytes  # MessagePack


class SampleRow(Struct, frozen=True, array_like=True):
    """One sample of the batch, as every rank sees it (advantages need the whole batch)."""

    sample_id: int
    group_id: int
    reward: float
    tokens: int  # T
    loss_tokens: int
    version: int  # v(group)
    truncated: bool = False  # cut by a limit of length or turns instead of ending by itself
    turn_rewards: list[float] = []  # `reward` is their sum; empty: all of it is the last turn's
    turn_states: list[int] = []  # a hash of what each turn answers: equal within a group where the same was observed


class Shard(TokenColumns, frozen=True, kw_only=True, tag="shard"):
    """One rank's part of the batch of `step`; `rows` lists the whole batch, ordered by sample id.

    The sequences follow as one concatenation: `lengths[i]` tokens for `members[i]`, an index into rows. `columns` holds
    every carried column, with one entry per token, turn or sequence; what a sample has once stands with each sequence.
    """

    step: int
    rank: int
    epoch: int
    rows: list[SampleRow]
    members: list[int]
    lengths: list[int]
    turn_starts: list[list[int]]  # per member: start of each generated span
    loss_tokens: int  # of the whole batch: the global normaliser
    metrics: dict[str, float] = {}  # the broker's view of this batch (staleness, queue, waits)

    def entries(self) -> dict[Scope, list[int]]:
        """Of each scope: how many entries each member has."""
        one_each = [1] * len(self.members)
        turns = [len(starts) for starts in self.turn_starts]
        return {"token": self.lengths, "turn": turns, "sequence": one_each, "sample": one_each}


# ---------------------------------------------------------------- weights: learner <-> generator


class WeightNotice(Struct, frozen=True, tag="weight_notice"):
    """Learner -> generator (PUSH/PULL, one pair per receiver): load this version, the newest."""

    version: Version
    probe_ids: list[int]


class WeightStatus(Struct, frozen=True, tag="weight_status"):
    """Generator -> learner, at every heartbeat and after each load (level-triggered)."""

    generator: int
    incarnation: int
    version: Version
    checksum: int = 0  # of the bytes received for `version`
    probe_logp: list[float] = []  # log-probabilities of probe_ids[1:] under the loaded weights
    wait_s: float = 0.0  # phases of the last load
    pause_s: float = 0.0
    copy_s: float = 0.0
    load_s: float = 0.0
    error: str = ""


# ---------------------------------------------------------------- control: every process <-> supervisor


class Register(Struct, frozen=True, tag="register"):
    role: str
    index: int
    incarnation: int
    pid: int


class Heartbeat(Struct, frozen=True, tag="heartbeat"):
    """From a thread; `progress` is counted by the main loop, so a hung loop is noticed."""

    role: str
    index: int
    incarnation: int
    progress: int
    busy: bool
    stats: dict[str, float] = {}
    waits: dict[str, float] = {}  # seconds waited so far, by whom was waited for


class Metrics(Struct, frozen=True, tag="metrics"):
    """A row for the tracker. `step` is the number of batches trained."""

    step: int
    values: dict[str, float]
    histograms: dict[str, list[float]] = {}


class Fatal(Struct, frozen=True, tag="fatal"):
    """A process gives up: `message` is the one line, `detail` the traceback or state dump."""

    role: str
    index: int
    message: str
    detail: str = ""


class Done(Struct, frozen=True, tag="done"):
    """The learner has finished; or the broker's closing report (`report` is its JSON)."""

    role: str
    report: bytes = b""


class PeerDied(Struct, frozen=True, tag="peer_died"):
    """The supervisor has fenced this incarnation: it is dead for certain."""

    role: str
    index: int
    incarnation: int


class Stop(Struct, frozen=True, tag="stop"):
    reason: str


TicketMessage = Ticket | ServerHello | CancelTickets | AckTickets | TicketFailed | TicketCancelled | Trajectory
RequestMessage = Generate | Abort | Generated | ClientHello | GeneratorHello | FirstToken | GeneratorStatus | Usage
BatchMessage = BatchRequest | Published | EvalRequest | SaveRequest | Journal | Shard
WeightMessage = WeightNotice | WeightStatus
ControlMessage = Register | Heartbeat | Metrics | Fatal | Done | PeerDied | Stop
Message = TicketMessage | RequestMessage | BatchMessage | WeightMessage | ControlMessage


_codec: Codec[Message] = Codec(Message)
encode = _codec.encode
decode = _codec.decode

"""Everything that crosses a socket, as typed structs.

A message is one multipart ZeroMQ message: a MessagePack header (msgspec, validated on decode, with
the protocol version), a frame with all smaller arrays, and one frame per large array. Nothing is ever pickled.

Array fields are annotated `np.ndarray`; in the header they stand as `(frame index, offset, dtype, shape)`.
Decoded arrays are read-only views of the received frames: copying is the receiver's decision.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

PROTOCOL = 1
_DTYPES = {name: np.dtype(name) for name in ("<i4", "<i8", "<f4", "|u1")}  # int32, int64, float32, uint8
_JOINED_BYTES = 1 << 16  # smaller arrays share a frame: a copy of them costs less than a frame each
_ALIGNMENT = 8

Frames = Sequence[bytes | memoryview]


class ProtocolError(ValueError):
    """A frame that does not decode: wrong protocol version, type, dtype or size."""


class Version(Struct, frozen=True, order=True, array_like=True):
    """Policy version: `n` batches trained and published in `epoch` (every resume begins a new epoch)."""

    epoch: int
    n: int


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
    """One generate -> step round. Positions index the trajectory's flat token axis."""

    start: int  # first generated token
    end: int  # one past the last generated token
    reward: float
    generate_s: float
    env_s: float
    finish_reason: str  # stop | length | abort
    generator: int


class Trajectory(Struct, frozen=True, tag="trajectory"):
    """One finished episode: T tokens, prompt and observations included (token in, token out).

    `loss_mask` is 1 on generated ids only; `logp_behavior` and `policy_version` are defined there
    (0 and -1 elsewhere). logp_behavior is of the distribution sampled from (temperature applied).
    """

    server: int
    incarnation: int
    seq: int
    ticket_id: int
    sample_id: int
    group_id: int
    task_index: int
    kind: str
    epoch: int
    token_ids: np.ndarray  # (T,) int32
    loss_mask: np.ndarray  # (T,) uint8
    logp_behavior: np.ndarray  # (T,) float32
    policy_version: np.ndarray  # (T,) int32
    turns: list[Turn]
    reward: float
    stop_reason: str  # done | length | context | max_turns
    tokens_generated: int  # as the generators reported, aborted parts included
    seconds: float
    info: dict[str, float] = {}  # numbers of the environment, averaged into metrics

    @property
    def first_version(self) -> int:
        """Version of the first generated token (F3); -1 when nothing was generated."""
        if not self.loss_mask.size:
            return -1
        first = self.loss_mask.argmax()
        return int(self.policy_version[first]) if self.loss_mask[first] else -1


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


class Generated(Struct, frozen=True, tag="generated"):
    """The one answer to a request. An abort answers with what was generated until then."""

    request_id: int
    session: int
    token_ids: np.ndarray  # (L,) int32
    logp: np.ndarray  # (L,) float32
    policy_version: np.ndarray  # (L,) int32
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


class Shard(Struct, frozen=True, tag="shard"):
    """One rank's part of the batch of `step`; `rows` lists the whole batch, ordered by sample id.

    The trajectories follow as one concatenation: `lengths[i]` tokens for `members[i]`, an index into rows.
    """

    step: int
    rank: int
    epoch: int
    rows: list[SampleRow]
    members: list[int]
    lengths: list[int]
    turn_starts: list[list[int]]  # per member: start of each generated span
    token_ids: np.ndarray  # (sum T,) int32
    loss_mask: np.ndarray  # (sum T,) uint8
    logp_behavior: np.ndarray  # (sum T,) float32
    policy_version: np.ndarray  # (sum T,) int32
    loss_tokens: int  # of the whole batch: the global normaliser
    metrics: dict[str, float] = {}  # the broker's view of this batch (staleness, queue, waits)


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


Message = (
    Ticket | ServerHello | CancelTickets | AckTickets | TicketFailed | TicketCancelled | Trajectory
    | Generate | Abort | Generated | ClientHello | GeneratorHello | FirstToken | GeneratorStatus | Usage
    | BatchRequest | Published | EvalRequest | SaveRequest | Journal | Shard
    | WeightNotice | WeightStatus
    | Register | Heartbeat | Metrics | Fatal | Done | PeerDied | Stop
)  # fmt: skip


class _Envelope(Struct, array_like=True):
    protocol: int
    body: Message


class _Buffers(threading.local):
    """Arrays met while encoding (joined, large) or decoding (frames) the message of this thread."""

    joined: list[bytes | memoryview]  # content of frame 1, padding included
    size: int  # of what is joined
    large: list[bytes | memoryview]  # frames 2, 3, ...
    frames: Frames


_buffers = _Buffers()


def _array_to_header(value: object) -> object:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value).__name__} cannot cross a socket")
    dtype, size = value.dtype.str, value.nbytes
    if dtype not in _DTYPES:
        raise ProtocolError(f"dtype {value.dtype} is not allowed on the wire")
    data = np.ascontiguousarray(value).data.cast("B") if size else b""
    if size >= _JOINED_BYTES:
        _buffers.large.append(data)
        return 1 + len(_buffers.large), 0, dtype, value.shape
    offset, padding = _buffers.size, -size % _ALIGNMENT
    _buffers.joined += (data, bytes(padding)) if padding else (data,)
    _buffers.size = offset + size + padding
    return 1, offset, dtype, value.shape


def _header_to_array(kind: type, value: Any) -> object:
    if kind is not np.ndarray:
        raise NotImplementedError
    index, offset, name, shape = value
    dtype = _DTYPES.get(name)
    if dtype is None or not 0 < index < len(_buffers.frames):
        raise ProtocolError(f"array frame {index} of dtype {name!r} does not exist")
    return np.ndarray(shape, dtype, _buffers.frames[index], offset)  # raises TypeError beyond the frame's end


_encoder = msgspec.msgpack.Encoder(enc_hook=_array_to_header)
_decoder = msgspec.msgpack.Decoder(_Envelope, dec_hook=_header_to_array)


def encode(message: Message) -> list[bytes | memoryview]:
    """Frames of one message: the header, the smaller arrays, then each large array's buffer (not copied)."""
    joined: list[bytes | memoryview] = []
    large: list[bytes | memoryview] = []
    _buffers.joined, _buffers.size, _buffers.large = joined, 0, large
    header = _encoder.encode(_Envelope(PROTOCOL, message))
    _buffers.joined, _buffers.large = [], []
    return [header, b"".join(joined), *large] if joined or large else [header]


def decode(frames: Frames) -> Message:
    """The message of these frames. Raises ProtocolError for anything that is not one."""
    _buffers.frames = frames
    try:
        envelope = _decoder.decode(frames[0])
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise ProtocolError(f"not a message of protocol {PROTOCOL}: {error}") from None
    finally:
        _buffers.frames = ()
    if envelope.protocol != PROTOCOL:
        raise ProtocolError(f"protocol {envelope.protocol}, this side speaks {PROTOCOL}")
    return envelope.body

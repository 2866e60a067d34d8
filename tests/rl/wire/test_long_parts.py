"""A batch part with a column that is larger than a frame arrives as it was sent, through the codec and a socket."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rl.wire import codec, sockets
from rl.wire.codec import SHARED_FRAMES
from rl.wire.messages import BatchPart, LongBatchPart, Message, ProtocolError, decode, encode, in_frames
from rl.wire.receiving import Malformed, Receiver
from rl.wire.sockets import identity, open_socket, send
from tests.conftest import MakeRun

FRAME_BYTES, PIECE_BYTES = codec.MAX_FRAME_BYTES, codec.PIECE_BYTES
LIMIT = 1 << 17  # above what has a frame of its own, as the real one
COLUMNS = {"token_ids": ((), "int32"), "routed_experts": ((48, 8), "uint8"), "whole_frame": ((128,), "int32")}
FITTING = {name: LIMIT // (int(np.prod(shape)) * np.dtype(kind).itemsize) for name, (shape, kind) in COLUMNS.items()}
AROUND = [(name, n * most + more) for name, most in FITTING.items() for n in (1, 2, 3) for more in (-1, 0, 1)]
SIZES = st.sampled_from([*FITTING]).flatmap(lambda name: st.tuples(st.just(name), st.integers(0, 3 * FITTING[name])))


@pytest.fixture(autouse=True, scope="module")
def short_frames() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "MAX_FRAME_BYTES", LIMIT)
        patch.setattr(codec, "PIECE_BYTES", LIMIT)
        patch.setattr(sockets, "MAX_FRAME_BYTES", LIMIT)
        yield


@pytest.fixture
def context() -> Iterator[zmq.SyncContext]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


def part_of(tokens: int, names: tuple[str, ...] = (*COLUMNS,)) -> BatchPart:
    random = np.random.default_rng(tokens)
    columns = {name: random.integers(0, 100, (tokens, *COLUMNS[name][0]), COLUMNS[name][1]) for name in names}
    return BatchPart(
        step=3,
        rank=1,
        timeline=0,
        rows=[],
        members=[0],
        lengths=[tokens],
        turn_starts=[[]],
        columns=columns,
        loss_tokens=0,
    )


def check_same(received: Message, sent: BatchPart) -> None:
    part = received.joined() if isinstance(received, LongBatchPart) else received
    assert isinstance(part, BatchPart) and list(part.columns) == list(sent.columns)
    assert replace(part, columns={}) == replace(sent, columns={})
    for name, values in sent.columns.items():
        assert part.columns[name].dtype == values.dtype
        np.testing.assert_array_equal(part.columns[name], values)


@given(st.sampled_from(AROUND) | SIZES)
def test_every_size_around_the_limit_comes_whole_and_in_frames_that_fit(case: tuple[str, int]) -> None:
    name, tokens = case
    sent = part_of(tokens, (name,))
    message = in_frames(sent)
    frames = [memoryview(frame) for frame in encode(message)]
    check_same(decode(frames), sent)

    assert max(frame.nbytes for frame in frames[1:]) <= LIMIT
    is_long = tokens > FITTING[name]
    assert isinstance(message, LongBatchPart) == is_long
    assert is_long or encode(message) == encode(sent), "what fits has the bytes that it had"


def test_a_slow_link_carries_each_frame_within_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ hears nothing of a peer before its frame is whole, and closes the connection after 10 s."""
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", FRAME_BYTES)
    monkeypatch.setattr(codec, "PIECE_BYTES", PIECE_BYTES)
    bytes_per_s = 1e9 / 8
    column = np.zeros(int(8 * bytes_per_s), np.uint8)
    part = replace(part_of(0), columns={"routed_experts": column})
    longest = max(memoryview(frame).nbytes for frame in encode(in_frames(part)))
    assert longest / bytes_per_s < 10 / 2


def test_decoding_takes_no_memory_beside_the_frames() -> None:
    """They may be a stranger's: who sent them is looked at later."""
    frames = [bytes(frame) for frame in encode(in_frames(part_of(3 * FITTING["routed_experts"])))]
    received = decode(frames)
    assert isinstance(received, LongBatchPart)
    arrays = [*received.part.columns.values(), *(piece for rest in received.rest.values() for piece in rest)]
    assert len(frames) > SHARED_FRAMES and len(arrays) > len(received.part.columns)
    for array in arrays:
        assert any(np.shares_memory(array, np.frombuffer(frame, np.uint8)) for frame in frames if frame)


@pytest.mark.parametrize(
    "rest",
    [
        {"unknown": [np.zeros(3, np.int32)]},
        {"token_ids": [np.zeros(3, np.float32)]},
        {"token_ids": [np.zeros((3, 2), np.int32)]},
        {"token_ids": [np.zeros((), np.int32)]},
        {"routed_experts": [np.zeros((3, 48, 7), np.uint8)]},
    ],
)
def test_pieces_that_do_not_fit_are_no_part(rest: dict[str, list[np.ndarray]]) -> None:
    with pytest.raises(ProtocolError, match="pieces of column"):
        LongBatchPart(part_of(3), rest).joined()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_every_size_around_the_limit_passes_a_socket(
    make_run: MakeRun, context: zmq.SyncContext, transport: str
) -> None:
    """The limit is that of a frame's content; on its way it has a seal as well."""
    run = make_run(f"network.transport={transport}")
    learner = open_socket(zmq.ROUTER, run, "batches", 0, bind=True, context=context)
    broker = open_socket(zmq.DEALER, run, "batches", 0, identity=identity("broker", 0), context=context)
    arrived: list[Message] = []
    receiver = Receiver({learner: lambda message, _: arrived.append(message)}, Malformed("learner.0"))

    sent = [part_of(tokens, (name,)) for name, tokens in AROUND]
    for part in sent:
        send(broker, in_frames(part))
    while len(arrived) < len(sent):
        assert receiver.wait(60), f"{len(arrived)} of {len(sent)} arrived"
        receiver.drain()
    for received, part in zip(arrived, sent, strict=True):
        check_same(received, part)

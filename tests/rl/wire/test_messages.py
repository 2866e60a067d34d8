"""Frames: typed, validated, without pickle."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from experiments.columns import token_columns
from rl.wire import codec
from rl.wire.codec import PROTOCOL
from rl.wire.messages import (
    Generate,
    Message,
    ProtocolError,
    Stop,
    TokenSequence,
    Trajectory,
    Turn,
    Version,
    decode,
    decode_all,
    encode,
    encode_all,
)


def trajectory(length: int) -> Trajectory:
    columns = token_columns(
        np.arange(length),
        np.arange(length) % 2,
        logp_behavior=np.linspace(-1, 0, length),
        policy_version=7,
    )

    return Trajectory(
        server=0,
        incarnation=0,
        seq=1,
        ticket_id=2,
        sample_id=3,
        group_id=4,
        task_index=5,
        kind="train",
        timeline=0,
        sequences=[TokenSequence(columns=columns, turns=[Turn(1, 2, 1.0, 0.1, 0.2, "stop", 0)])],
        reward=1.0,
        success=True,
        stop_reason="done",
        tokens_generated=1,
        seconds=1.0,
    )


@pytest.mark.parametrize("length", [0, 1, 4096])
def test_round_trip(length: int) -> None:
    sent = trajectory(length)
    received = decode([bytes(frame) for frame in encode(sent)])
    assert isinstance(received, Trajectory)
    assert received.sequence.columns.keys() == sent.sequence.columns.keys()
    for name, array in received.sequence.columns.items():
        np.testing.assert_array_equal(array, sent.sequence.columns[name])
        assert array.dtype == sent.sequence.columns[name].dtype
    assert received.sequence.turns == sent.sequence.turns
    assert received.sequence.oldest_version == (7 if length > 1 else -1)


def test_several_go_as_one_each_with_its_own_arrays() -> None:
    sent: list[Message] = [trajectory(3), Stop("x"), trajectory(20_000), trajectory(0), trajectory(5)]
    frames = [bytes(frame) for frame in encode_all(sent)]
    first, stop, *others = decode_all(frames)
    assert stop == sent[1]
    for here, there in zip([first, *others], [sent[0], *sent[2:]], strict=True):
        assert isinstance(here, Trajectory) and isinstance(there, Trajectory)
        for name, array in here.sequence.columns.items():
            np.testing.assert_array_equal(array, there.sequence.columns[name])

    with pytest.raises(ProtocolError, match="not one message but 5"):
        decode(frames)
    with pytest.raises(ProtocolError, match="empty list"):
        decode_all([bytes(frame) for frame in encode_all([])])


@pytest.mark.parametrize("length", [3, 8, 20_000])
def test_smaller_arrays_share_an_aligned_frame(length: int) -> None:
    sent = trajectory(length)
    frames = [bytes(frame) for frame in encode(sent)]
    assert len(frames) == (5 if length == 20_000 else 2)  # of 20 000 tokens, three arrays have 80 kB
    received = decode(frames)
    assert isinstance(received, Trajectory)
    for name, array in received.sequence.columns.items():
        np.testing.assert_array_equal(array, sent.sequence.columns[name])
        assert array.flags.aligned and not array.flags.writeable


@given(frames=st.lists(st.binary(max_size=64), min_size=1, max_size=4))
def test_garbage_is_refused_with_one_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        decode(frames)


@pytest.mark.parametrize(
    ("offset", "shape"), [(-8, [2]), (0, [-1]), (0, [2**63]), (2**70, [1]), (0, [2**62, 8]), (8, [3]), (0, 4)]
)
def test_an_array_beyond_its_frame_is_refused(offset: int, shape: object) -> None:
    """A negative offset would read the receiver's own memory."""
    request = Generate(1, 2, "train", Version(0, 3), np.zeros(4, np.int32), 8, 1.0, 1.0, [0])
    place = (1, min(offset, 2**64 - 1), "<i4", shape)
    header = msgspec.msgpack.encode([PROTOCOL, msgspec.to_builtins(request, enc_hook=lambda _: place)])
    with pytest.raises(ProtocolError):
        decode([header, bytes(16)])


def test_no_frames_and_endless_nesting_are_refused() -> None:
    header = bytes(encode(Generate(1, 2, "train", Version(0, 3), np.zeros(4, np.int32), 8, 1.0, 1.0, [0]))[0])
    before, name, after = header.partition(b"prompt_ids")
    for frames in ([], [before + name + b"\x91" * 100_000 + after, b""]):
        with pytest.raises(ProtocolError):
            decode(frames)


def test_a_frame_that_no_receiver_would_take_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1 << 20)
    with pytest.raises(ProtocolError, match="larger than a frame may be"):
        encode(Generate(1, 2, "train", Version(0, 3), np.zeros(1 << 19, np.int32), 8, 1.0, 1.0, [0]))


def test_missing_or_misshapen_buffers_are_refused() -> None:
    header, *buffers = [bytes(frame) for frame in encode(trajectory(8))]
    with pytest.raises(ProtocolError, match="does not exist"):
        decode([header])
    with pytest.raises(ProtocolError):
        decode([header, buffers[0][:-1], *buffers[1:]])


def test_other_protocol_version_is_refused() -> None:
    header = bytes(encode(Stop("x"))[0])
    with pytest.raises(ProtocolError, match="protocol 9"):
        decode([header.replace(b"\x92\x03", b"\x92\x09", 1)])


@given(ids=arrays.arrays(np.int32, st.integers(0, 50)))
def test_prompts_survive(ids: np.ndarray) -> None:
    request = Generate(1, 2, "train", Version(0, 3), ids, 8, 1.0, 1.0, [0])
    received = decode([bytes(frame) for frame in encode(request)])
    assert isinstance(received, Generate)
    np.testing.assert_array_equal(received.prompt_ids, ids)


def test_float64_is_not_allowed_on_the_wire() -> None:
    with pytest.raises(ProtocolError, match="float64"):
        encode(Generate(1, 2, "train", Version(0, 3), np.zeros(2), 8, 1.0, 1.0, [0]))


def test_versions_are_ordered_by_timeline_first() -> None:
    assert Version(1, 0) > Version(0, 9) > Version(0, 8)

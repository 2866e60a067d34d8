"""Frames that no peer would send, on every socket of a live run: they cost nobody a process, a sample or a token."""

from __future__ import annotations

import contextlib
import itertools
import random
import signal
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from msgspec.structs import replace

from rl.store.batch_files import read_batch_parts
from rl.weights.host import wire
from rl.wire import messages
from rl.wire.codec import PROTOCOL
from rl.wire.messages import Frames, Message, Version, encode
from rl.wire.names import Names
from rl.wire.run import RunFile
from rl.wire.sockets import open_socket
from tests.any_message import KINDS, any_message
from tests.rollout.trajectories import make_trajectory
from tests.test_end_to_end_simulated import check_books, finish, metrics_rows, start, wait_for_step

ALONE = ("control", "tickets", "trajectories", "usage", "steps", "frontend", "backend", "weight_status")
PROMPT = np.arange(4, dtype=np.int32)
HUGE = 2**63 - 1
TICKET = messages.Ticket(1, 0, 0, 0, Version(0, 0))


def generate(prompt: np.ndarray, max_tokens: int) -> Message:
    return messages.Generate(1, 2, "train", Version(0, 3), prompt, max_tokens, 1.0, 1.0, [0])


FORGED: list[Message] = [
    messages.ServerHello(7, 0, 1000),
    messages.ServerHello(0, 0, -1),
    messages.TicketFailed(0, 0, HUGE, 1, "forged"),
    messages.TicketCancelled(1, 0, -5, 1),
    make_trajectory(TICKET, seq=3, reward=1.0, incarnation=9),
    make_trajectory(TICKET, seq=HUGE, reward=1.0),
    generate(PROMPT, 8),
    generate(PROMPT.reshape(2, 2), -1),
    messages.Abort(1),
    messages.GeneratorHello(0, 5, HUGE, HUGE, HUGE, Version(0, 0)),
    messages.GeneratorStatus(0, 0, Version(0, 9), {1: 5}),
    messages.WeightStatus(0, 5, Version(0, 99), error="forged"),
    messages.BatchRequest(HUGE),
    messages.Published(Version(0, HUGE)),
    messages.SaveRequest(Version(-1, -1)),
    messages.EvalRequest(Version(0, 0), HUGE),
    messages.Register("learner", 0, 0, {"tickets": "tcp://127.0.0.1:1"}, ["steps"]),
    messages.Heartbeat("broker", 0, 0, 1, True),
    messages.Metrics(3, {"train/loss": float("nan")}),
    messages.Fatal("learner", 0, "forged"),
    messages.Done("broker", b"no json"),
    messages.Done("learner"),
    messages.Stop("forged"),
    messages.PeerDied("generator", 0, 0),
]
QUESTIONS: list[wire.Question] = [
    wire.Fetch(99, -5, HUGE),
    wire.Commit(9, 99, [(HUGE, HUGE, HUGE)]),
    wire.AskLease("x" * 500, HUGE, Version(0, 0)),
    wire.AskLease("", -1, Version(HUGE, HUGE)),
]


def array_header(array: object) -> bytes:
    """Of a request whose array is described by `array`."""
    fields = msgspec.to_builtins(generate(PROMPT, 8), enc_hook=lambda _: array)
    return msgspec.msgpack.encode([PROTOCOL, [fields]])


def hostile_frames() -> list[Frames]:
    whole = encode(generate(PROMPT, 8))

    arrays = [
        (1, -8, "<i4", [2]),
        (1, 0, "<i4", [2**63]),
        (1, 0, "<i4", [-1]),
        (9, 0, "|O", [1]),
        (1, 0, "<i4", 4),
        None,
    ]

    frames: list[Frames] = [
        [b""],
        [b"\xc1garbage"],
        [b"\x91" * 100_000],
        [b"\x92\x09\x80"],
        [b""] * 300,
        [bytes(1 << 20)],
        whole[:1],
        [bytes(whole[0])[:-3], *whole[1:]],
        *([array_header(array), bytes(16)] for array in arrays),
        *(encode(message) for message in FORGED),
        *(wire.codec.encode(wire.Numbered(-1, question)) for question in QUESTIONS),
    ]
    return frames


def sockets_of(run: RunFile) -> list[str]:
    config = run.config
    several = {"batches": config.learner.ranks, "blobs": config.learner.ranks, "notices": config.generator.count}
    return [*ALONE, *(f"{kind}.{index}" for kind, count in several.items() for index in range(count))]


def attack(run: RunFile, *, keyed: bool) -> None:
    """Every frame, on every socket: from a peer with a name that nobody has, or without the run's key."""
    context = zmq.Context()
    for name in sockets_of(run):
        kind, _, index = name.partition(".")
        sender = open_socket(
            zmq.DEALER,
            run,
            kind,
            int(index) if index else None,
            identity=b"env_server.9.0",
            context=context,
        )
        for frames in hostile_frames():
            with contextlib.suppress(zmq.Again) if not keyed else contextlib.nullcontext():
                sender.send_multipart(frames, zmq.DONTWAIT)  # nobody takes it from one who is refused

        with socket.socket(socket.AF_UNIX) as raw:  # not even ZeroMQ: a greeting, then a frame of 2^60 bytes
            raw.connect(run.place_of(name).removeprefix("ipc://"))
            raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03" + bytes(53) + b"\x02\x10" + bytes(7))
    context.destroy(linger=1000)


@pytest.mark.parametrize("keyed", [True, pytest.param(False, marks=pytest.mark.docs)])
def test_no_frame_ends_a_run(tmp_path: Path, keyed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(tmp_path, "steps=60", "weights.transport=zmq", "learner.options.step_s=0.15")
    wait_for_step(tmp_path, 2)
    if not keyed:
        monkeypatch.setattr("rl.wire.sockets._secure", lambda *_, server: None)
    attack(RunFile.load(tmp_path / "simulated"), keyed=keyed)
    assert process.poll() is None
    check_books(finish(process, tmp_path), steps=60)

    last = [row for row in metrics_rows(tmp_path) if "train/loss" in row][-1]
    dropped = {name: value for name, value in last.items() if name.endswith("/malformed")}
    if not keyed:
        assert dropped and not any(dropped.values()), "a stranger without the key was heard"
        return
    for name in ("broker.0", "proxy.0", "generator.0", "generator.1"):
        assert dropped[f"{name}/malformed"] > 10, name

    logs = {log.stem: log.read_text() for log in (tmp_path / "simulated" / "logs").glob("*.log")}
    for owner in ("learner.0", "updater", "weights"):
        assert f"{owner}: dropped message" in logs["learner.0.0"]
    assert sum(map(len, logs.values())) < 50_000, "bad input floods the logs"


def forged_batches(run: RunFile) -> list[Message]:
    """As the broker makes them, with other rewards: of the steps that the learner asks for next."""
    *_, part = read_batch_parts(run.folder)
    rows = [replace(row, reward=9.0, turn_rewards=[]) for row in part.rows]
    metrics = part.metrics | {"rollout/reward": 9.0}
    places = itertools.product(range(part.step, part.step + 4), range(run.config.learner.ranks))
    return [replace(part, step=step, rank=rank, rows=rows, metrics=metrics) for step, rank in places]


def speak_as(run: RunFile, name: bytes, pick: random.Random) -> None:
    """Every type of message, on every socket: from one who has the run's key, under a name of the run."""
    context = zmq.Context()
    forged = [*FORGED, *forged_batches(run)]
    for socket_name in sockets_of(run):
        kind, _, index = socket_name.partition(".")
        sender = open_socket(zmq.DEALER, run, kind, int(index) if index else None, identity=name, context=context)
        for message in [*(any_message(each, pick) for each in KINDS), *forged]:
            sender.send_multipart(encode(message), zmq.DONTWAIT)
    context.destroy(linger=2000)


def test_who_has_the_key_speaks_in_nobodys_name(tmp_path: Path) -> None:
    """Every message in the name of every living process: none is heard, and no name is taken over."""
    options = ("steps=5000", "weights.transport=zmq", "learner.options.step_s=0.1", "tracking.replay=full")
    process = start(tmp_path, *options)
    wait_for_step(tmp_path, 2)
    folder = tmp_path / "simulated"
    run = RunFile.load(folder)
    living = sorted(log.stem for log in (folder / "logs").glob("*.log"))
    assert {name.partition(".")[0] for name in living} >= {"broker", "proxy", "env_server", "generator", "learner"}

    pick = random.Random(0)
    for number, name in enumerate(living):
        names = Names() if number % 2 else Names.made()  # the plain name, and one that another run would prove
        speak_as(run, names.proven(name.encode()), pick)
    wait_for_step(tmp_path, metrics_rows(tmp_path)[-1]["step"] + 5)
    process.send_signal(signal.SIGINT)
    summary = finish(process, tmp_path, code=130)
    check_books(summary, steps=summary["steps"])

    assert not {"process-died", "data-repeated"} & summary["alarms"].keys(), summary["alarms"]
    assert summary["broker"]["refused_trajectories"] == 0
    assert sorted(log.stem for log in (folder / "logs").glob("*.log")) == living, "somebody was replaced"
    rows = [row for row in metrics_rows(tmp_path) if "train/loss" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1)) and all(
        0 <= row["train/reward"] <= 1 for row in rows
    )
    dropped = {name: rows[-1][f"{name}/malformed"] for name in ("broker.0", "proxy.0", "generator.0", "generator.1")}
    assert min(dropped.values()) > 100, dropped

"""The simulated learner as a process: the whole protocol over real sockets, with real weight bytes, without torch."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from rl.learner.simulated import simulated_loss, simulated_weights
from rl.store.checkpoint_folder import latest, read_journal, read_meta
from rl.weights import make_receiver
from rl.weights.channel import Receiver
from rl.wire import codec
from rl.wire.messages import (
    BatchRequest,
    BatchUnderway,
    Done,
    EvalRequest,
    Fatal,
    LongBatchPart,
    Metrics,
    PeerDied,
    Published,
    Version,
    in_frames,
)
from rl.wire.sockets import identity, open_socket, send
from rollout.broker.assembly import no_batch
from tests.conftest import MakeRun
from tests.rl.learner.learner_harness import Harness, make_batch

SIMULATED = ("learner.kind=simulated", "learner.options.weight_bytes=4096", "weights.probe=false")
MODULE = "rl.learner.simulated"


def test_parts_longer_than_a_frame_are_trained_and_joined_only_for_the_broker(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not fit together shows who was believed: it is found when pieces are joined."""
    monkeypatch.setattr(codec, "PIECE_BYTES", 64)
    run = make_run(*SIMULATED, "steps=3", "learner.options.step_s=0.01")
    batches = [make_batch(step) for step in range(3)]
    long = in_frames(batches[0][0])
    assert isinstance(long, LongBatchPart)
    broken = LongBatchPart(long.part, {"token_ids": [np.zeros(3, np.float32)]})

    with Harness(run, MODULE) as harness:
        assert harness.take(BatchRequest).step == 0
        peer = identity("env_server", 0)
        send(open_socket(zmq.DEALER, run, "batches", 0, identity=peer, context=harness.context), broken)
        assert "dropped message 1: stranger" in log_with(harness, "dropped message")
        send(harness.batch_parts[0], broken)
        assert "dropped message 2: pieces of column 'token_ids'" in log_with(harness, "message 2")

        harness.send_batch(batches[0])
        rows = [harness.take(Metrics), *harness.train(batches[1:])]
        harness.finish()
    expected = [simulated_loss(batch_part) for (batch_part,) in batches]
    assert [row.values["train/loss"] for row in rows] == expected


def log_with(harness: Harness, text: str) -> str:
    """The ranks' logs, once they say this."""
    deadline = time.monotonic() + 60
    while text not in (log := harness.logs()):
        assert time.monotonic() < deadline, log
        harness.pump()
    return log


@pytest.mark.parametrize("transport, ranks", [("shm", 1), ("shm", 2), ("zmq", 2)])
def test_three_steps_from_the_first_weights_to_the_end(make_run: MakeRun, transport: str, ranks: int) -> None:
    settings = ("steps=3", "learner.options.step_s=0.01", "eval.tasks=5", f"weights.transport={transport}")
    run = make_run(*SIMULATED, *settings, f"learner.ranks={ranks}")
    batches = [make_batch(step, ranks=ranks) for step in range(3)]
    with Harness(run, MODULE) as harness:
        harness.published(0)
        assert harness.take(EvalRequest) == EvalRequest(Version(0, 0), 5)
        rows = harness.train(batches)
        for n in (1, 2, 3):
            harness.published(n)
        assert harness.take(EvalRequest).version == Version(0, 3)  # the first and the last version, once each

        receiver = make_receiver(run, "generator-0-0", 0)
        version, tensors = receiver.take(Version(0, 3), 60)
        (weight,) = [tensor.numpy().copy() for _, tensor in tensors]
        assert np.array_equal(weight, simulated_weights(version, 1024))
        assert receiver.receipt()  # raises if any byte differs from its rank's digest
        assert receiver.release()
        receiver.close()

        for child in harness.children:
            assert "libtorch" not in Path(f"/proc/{child.pid}/maps").read_text()
        report = msgspec.json.decode(harness.finish().report)
        assert not [message for message in harness.inbox if isinstance(message, EvalRequest | BatchRequest)]

    assert [row.step for row in rows] == [1, 2, 3]
    rewards = [float(np.mean([sample.reward for sample in batch[0].rows])) for batch in batches]
    assert [row.values["train/reward"] for row in rows] == pytest.approx(rewards)
    assert rows[0].histograms["staleness"] == [0.0] * 8
    assert {"train/loss", "time/step", "time/wait_batch", "time/train", "time/publish"} <= rows[0].values.keys()
    assert rows[0].values["tokens/trained"] == sum(sum(batch_part.lengths) for batch_part in batches[0])
    assert rows[0].values["staleness/mean"] == 0.0  # the broker's columns are kept
    assert report["steps"] == 3
    assert report["last"]["loss"] == rows[2].values["train/loss"]
    saved = latest(run.folder / "checkpoints")
    assert saved is not None and read_meta(saved).step == 3 and read_journal(saved) == b"journal 3"


def test_a_broker_that_hangs_is_the_supervisor_s_to_find(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED, "steps=1", "learner.options.step_s=0", "timeouts.hang_s=1", "eval.tasks=0")
    with Harness(run, MODULE) as harness:
        assert harness.take(BatchRequest).step == 0
        harness.send_batch(make_batch(0))
        time.sleep(3)  # meanwhile the learner trains, and asks for a journal
        harness.take(Metrics)
        harness.finish()


def test_the_next_batch_is_requested_while_this_one_trains(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED, "steps=2", "learner.options.step_s=15")
    with Harness(run, MODULE) as harness:
        assert harness.take(BatchRequest).step == 0
        harness.send_batch(make_batch(0))
        assert harness.take(BatchRequest).step == 1
        assert not [message for message in harness.inbox if isinstance(message, Metrics)]
        harness.stop()


def test_evaluations_come_at_their_period_and_never_twice(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED, "steps=4", "learner.options.step_s=0", "eval.tasks=1", "eval.every=2")
    with Harness(run, MODULE) as harness:
        harness.train([make_batch(step) for step in range(4)])
        harness.finish()
        assert [m.version.n for m in harness.inbox if isinstance(m, EvalRequest)] == [0, 2, 4]
        assert [m.version.n for m in harness.inbox if isinstance(m, Published)] == [0, 1, 2, 3, 4]


def test_a_run_whose_time_is_over_is_evaluated_and_saved_once(make_run: MakeRun) -> None:
    """The batch says so. A learner that is killed after the last one hears it again when it asks for another."""
    run = make_run(*SIMULATED, "steps=1000", "seconds=60", "learner.options.step_s=0", "eval.tasks=3")
    (last,) = make_batch(1)
    with Harness(run, MODULE) as harness:
        rows = harness.train([make_batch(0)])
        assert harness.take(BatchRequest).step == 1
        harness.send_batch([msgspec.structs.replace(last, over=1.02)])
        rows.append(harness.take(Metrics))
        harness.take(Done)
        assert [m.version.n for m in harness.inbox if isinstance(m, EvalRequest)] == [0, 2]
        saved = latest(run.folder / "checkpoints")
        assert saved is not None and read_meta(saved).step == 2

        harness.restart()
        assert harness.take(BatchRequest).step == 2
        assert not [message for message in harness.inbox if isinstance(message, EvalRequest)]
        harness.send_batch([no_batch(2, 2, 0, 0)])
        assert harness.take(EvalRequest).version == Version(0, 2)
        harness.finish()
    assert [row.values["time/over"] for row in rows] == [0.0, 1.02]


def test_a_resumed_run_starts_at_its_step_in_its_timeline(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED, "steps=9", "learner.options.step_s=0", timeline=5, start_step=7)
    with Harness(run, MODULE) as harness:
        harness.published(7)
        rows = harness.train([make_batch(step, timeline=5) for step in (7, 8)])
        harness.published(8)
        harness.published(9)
        harness.finish()
    assert [row.step for row in rows] == [8, 9]


def test_a_batch_of_an_earlier_timeline_is_no_answer(make_run: MakeRun) -> None:
    """As the broker may send it to a rank that begins elsewhere, before it knows that."""
    run = make_run(*SIMULATED, "learner.options.step_s=0", "steps=1", "eval.tasks=0", timeline=1000)
    with Harness(run, MODULE) as learner:
        learner.published(0)
        assert learner.take(BatchRequest).step == 0
        learner.send_batch(make_batch(0, seed=7))
        learner.send_batch(make_batch(0, timeline=1000))
        assert learner.take(Metrics).values["version/timeline"] == 1000
        learner.published(1)
        learner.finish()


def test_a_stale_batch_ends_the_run_with_one_clear_line(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED, "steps=5", "rollout.alpha=1", start_step=3)
    with Harness(run, MODULE) as harness:
        harness.take(BatchRequest)
        harness.send_batch(make_batch(3, version=1))
        assert harness.take(Fatal).message.startswith(
            "RunAlarm: alarm stale-batch: the batch of step 3 holds 8 of 8 samples that are too old"
        )
        assert harness.children[0].wait(60) == 1


def test_a_batch_that_does_not_come_names_who_waited_for_what(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED, "learner.batch_deadline_s=0.3")
    with Harness(run, MODULE) as harness:
        expected = "WaitExpired: learner.0 waited 0.3 s for broker: batch 0 (learner.batch_deadline_s)"
        assert harness.take(Fatal).message == expected


def test_a_learner_waits_for_as_long_as_its_batch_comes_nearer(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED, "steps=1", "learner.options.step_s=0", "learner.batch_deadline_s=3")
    with Harness(run, MODULE) as harness:
        harness.take(BatchRequest)
        for _ in range(10):
            time.sleep(0.5)
            send(harness.batch_parts[0], BatchUnderway(0))
        harness.send_batch(make_batch(0))
        assert harness.take(Metrics).step == 1
        harness.finish()


def test_a_learner_that_waits_for_a_batch_stops_when_told(make_run: MakeRun) -> None:
    run = make_run(*SIMULATED)
    with Harness(run, MODULE) as harness:
        harness.take(BatchRequest)
        harness.stop()


@pytest.mark.parametrize("transport", ["shm", "zmq"])
def test_a_learner_that_waits_for_another_rank_s_weights_stops_when_told(make_run: MakeRun, transport: str) -> None:
    """A rank that was told to stop first commits nothing more; rank 0 must not wait for it."""
    run = make_run(*SIMULATED, "learner.ranks=2", "learner.options.step_s=0", f"weights.transport={transport}")
    with Harness(run, MODULE) as harness:
        harness.published(0)
        assert harness.take(BatchRequest).step == 0
        send(harness.batch_parts[0], make_batch(0, ranks=2)[0])  # rank 1 gets none
        assert harness.take(BatchRequest).step == 1
        harness.pump(0.5)
        assert not [message for message in harness.inbox if isinstance(message, Published)]
        harness.stop()
        done = [message for message in harness.inbox if isinstance(message, Done)] or [harness.take(Done)]
        assert msgspec.json.decode(done[0].report)["weight_sync"]["count"] == 0  # no generator took any


def leased_slot(make_run: MakeRun, *overrides: str) -> tuple[Harness, Receiver]:
    """A learner with two slots, one of them taken by a receiver that never gives it back."""
    run = make_run(*SIMULATED, "steps=3", "learner.options.step_s=0", "weights.slots=2", *overrides)
    harness = Harness(run, MODULE).start()
    harness.published(0)
    receiver = make_receiver(run, "generator-0-0", 0)
    receiver.take(Version(0, 0), 60)
    return harness, receiver


def test_the_death_of_a_generator_frees_what_it_leased(make_run: MakeRun) -> None:
    harness, _receiver = leased_slot(make_run)
    with contextlib.closing(harness):
        harness.train([make_batch(0)])
        harness.published(1)
        assert harness.take(BatchRequest).step == 1
        harness.send_batch(make_batch(1))
        harness.pump(0.5)
        assert not [message for message in harness.inbox if isinstance(message, Published)]  # waits for the slot
        harness.tell(PeerDied("generator", 0, 0))
        harness.published(2)
        harness.stop()


def test_a_slot_that_does_not_become_free_names_its_holder(make_run: MakeRun) -> None:
    harness, _receiver = leased_slot(make_run, "weights.deadline_s=2")
    with contextlib.closing(harness):
        harness.train([make_batch(0)])
        harness.send_batch(make_batch(1))
        message = harness.take(Fatal).message
        assert message.startswith("WaitExpired: no slot within weights.deadline_s=2 s")
        assert "generator-0-0" in message

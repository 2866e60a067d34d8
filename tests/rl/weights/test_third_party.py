"""A channel of somebody else's is one file: a broadcast by gloo, which everything else meets by `weights.transport`."""

from __future__ import annotations

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.config.schema import ConfigError
from rl.weights import channel_of, make_receiver, make_sender
from rl.weights.channel import Entry, Sender
from rl.wire.messages import Version
from rl.wire.run import RunFile
from tests.conftest import MakeRun
from tests.copies import COPIES
from tests.rl.weights.gloo_channel import GlooReceiver
from tests.rl.weights.offering import offer_rows
from tests.test_end_to_end_simulated import check_books, finish, pid_of, start
from tests.test_learner_death import LEARNER, versions, wait_for_version

GLOO = "weights.transport=tests.rl.weights.gloo_channel:GLOO"
RANKS = 2
ENTRIES: list[Entry] = [("embed", (301, 16), "bfloat16"), ("scalar", (), "float32"), ("norm", (7,), "float32")]


def content(n: int) -> dict[str, torch.Tensor]:
    """Whole numbers that every dtype holds, other ones for each version and tensor."""
    return {name: torch.full(shape, float(8 * n + place)) for place, (name, shape, _) in enumerate(ENTRIES)}


def offer(senders: list[Sender], n: int) -> None:
    assert offer_rows(senders, n, content(n)) is None


class Dying(GlooReceiver):
    """It is killed in the middle of its update: some tensors are there, and some are not."""

    @property
    def progress(self) -> int:
        return 0

    @progress.setter
    def progress(self, received: int) -> None:
        if received:
            os.kill(os.getpid(), signal.SIGKILL)


def follow(folder: str, name: str, incarnation: int, dying: bool, asked: Connection) -> None:
    """Takes what is asked for, as (timeline, n), and answers what came: its version, and whether it is right."""
    run = RunFile.load(folder)
    receiver = Dying(run, name, incarnation) if dying else make_receiver(run, name, incarnation)
    while (at_least := asked.recv()) is not None:
        version, tensors = receiver.take(Version(*at_least), 60)
        arrived = dict(tensors)
        expected = content(version.n)
        right = all(torch.equal(arrived[each].float(), expected[each]) for each in expected)
        receipt = receiver.receipt()
        asked.send((version.n, right and arrived["embed"].dtype == torch.bfloat16, receipt, receiver.release()))
    receiver.close()


class Follower:
    def __init__(self, run: RunFile, name: str, incarnation: int = 0, *, dying: bool = False) -> None:
        self.ask, theirs = COPIES.Pipe()
        arguments = str(run.folder), name, incarnation, dying, theirs
        self.process = COPIES.Process(target=follow, args=arguments, daemon=True)
        self.process.start()

    def took(self) -> Any:
        assert self.ask.poll(120)
        return self.ask.recv()


def test_one_receiver_dies_in_an_update_and_one_is_two_versions_behind(make_run: MakeRun) -> None:
    run = make_run(GLOO, f"learner.ranks={RANKS}", "weights.deadline_s=60")
    senders = [make_sender(run, rank, ENTRIES) for rank in range(RANKS)]
    for sender in senders:
        sender.open()
    behind, other, dying = (Follower(run, f"generator-{i}-0", dying=i == 2) for i in range(3))
    try:
        behind.ask.send((0, 0))
        offer(senders, 0)
        assert behind.took() == (0, True, None, True)

        for follower in (other, dying):
            follower.ask.send((0, 1))
        store: Any = senders[0]._store  # type: ignore[attr-defined]
        while store.add("asks", 0) < 3:
            time.sleep(0.01)
        offer(senders, 1)  # both are in one session, which one of them breaks
        assert other.took() == (1, True, None, True)
        dying.process.join(60)
        assert dying.process.exitcode == -signal.SIGKILL

        senders[0].receiver_died("generator-2", 0)
        offer(senders, 2)
        again = Follower(run, "generator-2-0", 1)
        for follower in (behind, again):
            follower.ask.send((0, 1))
            assert follower.took() == (2, True, None, True)
            follower.ask.send(None)
    finally:
        for sender in reversed(senders):
            sender.close()


@pytest.mark.docs
def test_a_run_whose_learner_and_generator_die_ends_in_a_new_timeline(tmp_path: Path) -> None:
    """No host knows a checksum: what is trained again counts as new, and every generator takes it."""
    settings = ("steps=12", "learner.ranks=2", "learner.checkpoint_every=4", "learner.options.step_s=0.15")
    process = start(tmp_path, GLOO, *settings, "generator.count=2", "weights.deadline_s=120")
    wait_for_version(process, tmp_path, 2)
    os.kill(pid_of(tmp_path, "rollout.generator.process", 1), signal.SIGKILL)
    wait_for_version(process, tmp_path, 6)
    os.kill(pid_of(tmp_path, LEARNER), signal.SIGKILL)

    check_books(finish(process, tmp_path), 12)
    lines = versions(tmp_path)
    assert {line["checksum"] for line in lines} == {None}
    first = next(line["n"] for line in lines if line["timeline"] == 1)
    assert first == 4 and [line["n"] for line in lines if line["timeline"] == 1] == list(range(4, 13))


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("shn", "weights.transport='shn' is not a registered name; did you mean 'shm'?"),
        ("os:path", "weights.transport='os:path': it names no rl.weights.channel.Channel"),
        ("nowhere:GLOO", "weights.transport='nowhere:GLOO' cannot be imported"),
    ],
)
def test_what_names_no_channel_is_one_line(named: str, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        channel_of(named)
    assert told in str(error.value) and "\n" not in str(error.value)

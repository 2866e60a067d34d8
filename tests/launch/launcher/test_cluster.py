"""The head of a cluster, and agents that are a socket of the test: what is said, and what is made of it."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import zmq

from launch.launcher.cluster import ClusterLauncher
from launch.launcher.copies import TIMELINES
from launch.launcher.folders import Arriving, Fetcher, Opened, made_in
from launch.launcher.head_file import Before, Began, HeadFile, Listens, Machine, read_before
from launch.launcher.node_messages import (
    KEY_FILE,
    Ask,
    Back,
    Beat,
    FromAgent,
    FromHead,
    Hello,
    Orders,
    Part,
    Refused,
    Sent,
    Want,
    Welcome,
    Who,
    agent_socket,
    code_hash,
    codec,
)
from launch.launcher.protocol import Handle, Spec
from rl.config.schema import ConfigError
from rl.learner.changes import CHANGES, WISH
from rl.observe.trace import boot_id
from rl.store.checkpoint_folder import Meta, begin, commit, latest, read_journal
from rl.store.digests import DIGESTS, write_digests
from rl.wire.run import RunFile, key_pair
from rl.wire.sockets import make_curve_key
from tests.conftest import MakeRun

LEASE_S = 3.0
PATIENCE_S = 20.0
FINISH_S = 60.0
M = TypeVar("M", bound=FromHead)


class FakeAgent:
    def __init__(self, launcher: ClusterLauncher | str, key: bytes, name: bytes = b"agent.1") -> None:
        self.sees = True
        self.made: dict[str, str] = {}
        self.answered = self.changes = b""
        self.socket = agent_socket(zmq.DEALER, key_pair(key), name)
        self.socket.connect(f"tcp://{launcher if isinstance(launcher, str) else launcher.address}")
        self.beats = 0

    def say(self, message: FromAgent) -> None:
        self.socket.send_multipart(codec.encode(message))

    def hear(self, kind: type[M], is_it: Callable[[M], bool] = lambda _: True) -> M:
        until = time.monotonic() + PATIENCE_S
        while self.socket.poll(int(1000 * max(0.0, until - time.monotonic()))):
            message = self.hear_any()
            if isinstance(message, kind) and is_it(message):
                return message
        raise TimeoutError(f"no such {kind.__name__}")

    def hear_any(self) -> FromAgent | FromHead:
        assert self.socket.poll(int(1000 * PATIENCE_S))
        return codec.decode(self.socket.recv_multipart())

    def join(self) -> Welcome:
        self.say(Hello(0, ["7", "8"], code_hash()))
        welcome = self.hear(Welcome)
        self.beat()
        return welcome

    def beat(self, leaving: bool = False, **states: int | None) -> Orders:
        self.beats += 1
        named = {".".join(name.rsplit("_", 2)): code for name, code in states.items()}
        self.say(Beat(self.beats, named, {}, self.sees, leaving, self.made, self.answered, self.changes))
        return self.hear(Orders, lambda orders: orders.beat == self.beats)

    def serve(self, made: Path, **states: int | None) -> Orders:
        """One beat, and the answers to what the head asks for of these folders."""
        self.beats += 1
        named = {".".join(name.rsplit("_", 2)): code for name, code in states.items()}
        self.say(Beat(self.beats, named, {}, self.sees, False, self.made))
        while True:
            match self.hear_any():
                case Want(name):
                    self.opened = Opened(made, name)
                    self.say(Sent(name, self.opened.files))
                case Ask() as ask:
                    self.say(self.opened.part(ask))
                case Orders() as orders if orders.end or orders.beat == self.beats:
                    return orders


class Head:
    """A launcher, which waits in a thread for its machines."""

    def __init__(self, run: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
        begun = threading.Event()
        self.run = run
        monkeypatch.setattr("launch.launcher.cluster.begin_agents", self._begin_agents(begun))
        self.failed: list[Exception] = []
        self.thread = threading.Thread(target=self._make, daemon=True)
        self.thread.start()
        assert begun.wait(PATIENCE_S)
        self.key = (run.folder / KEY_FILE).read_bytes()

    def _begin_agents(self, begun: threading.Event) -> Callable[..., object]:
        from launch.launcher.engines import Agents

        def begin(_run: RunFile, _address: str) -> Agents:
            begun.set()
            return Agents()

        return begin

    def _make(self) -> None:
        self.launcher = ClusterLauncher.__new__(ClusterLauncher)
        try:
            self.launcher.__init__(self.run)  # type: ignore[misc]
        except Exception as error:
            self.failed.append(error)

    def start(self, name: str, gpus: tuple[str, ...] = ()) -> Handle:
        self.thread.join(PATIENCE_S)
        role, index, _ = name.split(".")
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        log = self.run.folder / f"{name}.log"
        spec = Spec(name, "a.module", ("--run", "r", "--host", "h"), environment, log, gpus)
        return self.launcher.start(spec, self.launcher.place(role, int(index)))


@pytest.fixture
def run(make_run: MakeRun) -> RunFile:
    named = ("cluster.nodes=1", "network.transport=tcp", f"cluster.lease_s={LEASE_S:g}", "timeouts.start_s=60")
    return make_run(*named)


@pytest.fixture
def head(run: RunFile, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    head = Head(run, monkeypatch)
    yield head
    head.launcher._members.by_agent.clear()  # of agents that will not say that they end
    head.launcher.close()


def test_an_agent_without_the_key_or_with_other_code_gets_nothing(head: Head, tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    stranger = FakeAgent(head.launcher, public + b"\n" + secret, b"stranger")
    run_key = FakeAgent(head.launcher, (head.run.folder / "curve.key").read_bytes(), b"env_server")
    for other in (stranger, run_key):
        other.say(Hello(0, [], code_hash()))

    agent = FakeAgent(head.launcher, head.key)
    agent.say(Hello(0, [], "other code"))
    assert "same version" in agent.hear(Refused).reason
    agent.say(Ask("../run.json", 0))  # before it is welcome, and no file of the model
    welcome = agent.join()
    assert json.loads(welcome.run)["run_id"] == head.run.run_id
    assert welcome.key == (head.run.folder / "curve.key").read_bytes()
    assert not stranger.socket.poll(100) and not run_key.socket.poll(0)


def test_an_order_is_repeated_until_it_is_seen_to_be_done_and_gpus_are_the_machines_own(head: Head) -> None:
    agent = FakeAgent(head.launcher, head.key)
    agent.join()
    handle = head.start("generator.0.0", gpus=("0",))
    for _ in range(2):  # as after a connection was made again: what was said is lost
        (start,) = agent.beat().start
        assert start.name == "generator.0.0" and start.environment["CUDA_VISIBLE_DEVICES"] == "7"

    assert not agent.beat(generator_0_0=None).start and handle.poll() is None
    handle.kill()
    assert agent.beat(generator_0_0=None).kill == ["generator.0.0"]
    assert handle.wait(0) is None, "nobody has said that it is dead"
    assert not agent.beat(generator_0_0=-9).kill and handle.wait(PATIENCE_S) == -9


def test_a_machine_is_lost_after_its_lease_and_nothing_that_it_says_then_counts(head: Head) -> None:
    agent = FakeAgent(head.launcher, head.key)
    agent.join()
    handle = head.start("env_server.0.0")
    agent.beat(env_server_0_0=None)
    begun = time.monotonic()
    assert handle.wait(PATIENCE_S) == -9 and "machine 1 is lost" in handle.why  # type: ignore[attr-defined]
    assert time.monotonic() - begun >= LEASE_S, "its lease was not over"

    waiting = head.start("env_server.0.1")
    orders = agent.beat(env_server_0_0=None)
    assert orders.end and not orders.start and waiting.poll() is None

    fresh = FakeAgent(head.launcher, head.key, b"agent.2")
    assert fresh.join().machine == 1
    assert [start.name for start in fresh.beat().start] == ["env_server.0.1"]


def test_a_machine_that_leaves_is_let_go_when_nothing_runs_there(head: Head) -> None:
    agent = FakeAgent(head.launcher, head.key)
    agent.join()
    handle = head.start("env_server.0.0")
    agent.beat(env_server_0_0=None)
    orders = agent.beat(leaving=True, env_server_0_0=None)
    assert orders.kill == ["env_server.0.0"] and not orders.end
    assert agent.beat(leaving=True, env_server_0_0=-9).end
    assert handle.wait(PATIENCE_S) == -9 and "leaves" in handle.why  # type: ignore[attr-defined]


class Counted(dict[str, Any]):
    """How often anything in it was looked at."""

    looks = 0

    def __getitem__(self, name: str) -> Any:
        self.looks += 1
        return super().__getitem__(name)

    def values(self) -> Any:
        self.looks += len(self)
        return super().values()


def test_the_beat_of_one_machine_looks_at_no_process_of_another(head: Head) -> None:
    members = head.launcher._members
    members._patience_s = 1000.0
    agent = FakeAgent(head.launcher, head.key)
    agent.join()
    for index in range(200):
        head.start(f"generator.{index}.0")
    assert len(agent.beat().start) == 200

    other = FakeAgent(head.launcher, head.key, b"agent.2")
    other.join()
    assert len(members.by_agent[b"agent.1"].holds) == 200
    other.beat()  # by now those that have begun are told of
    counted = head.launcher._handles = Counted(head.launcher._handles)
    for _ in range(20):
        other.beat()
    assert counted.looks == 0
    agent.beat()
    assert counted.looks >= 200, "it counts"


def test_what_waits_for_a_machine_can_be_killed(head: Head) -> None:
    FakeAgent(head.launcher, head.key).join()
    handle = head.start("generator.0.0", gpus=("0", "1", "2"))
    handle.kill()
    assert handle.wait(0) == -9


def test_the_end_of_a_log_arrives_and_what_is_left_out_is_said(head: Head) -> None:
    agent = FakeAgent(head.launcher, head.key)
    agent.join()
    head.start("env_server.0.0")
    for offset, data in ((0, b"one\n"), (0, b"one\n"), (104, b"two\n")):
        agent.say(Beat(1, {"env_server.0.0": None}, {"env_server.0.0": (offset, data)}))
    assert agent.hear(Orders, lambda orders: orders.held.get("env_server.0.0") == 108)
    assert (head.run.folder / "env_server.0.0.log").read_text() == "one\n\n(100 bytes stand on its machine)\ntwo\n"


def test_a_machine_without_the_model_asks_for_its_files(
    run: RunFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    head = Head(run.model_copy(update={"model_folder": tmp_path}), monkeypatch)
    agent = FakeAgent(head.launcher, head.key)
    assert [*agent.join().files] == ["model/config.json"]
    for name in ("model/../secret", "model/config.json"):
        agent.say(Ask(name, 0))
    assert agent.hear(Part) == Part("model/config.json", 0, b"{}")

    (tmp_path / "config.json").unlink()  # as when somebody clears a cache
    agent.say(Ask("model/config.json", 0))
    assert agent.beat(), "the head is there for all others"
    head.launcher._members.by_agent.clear()
    head.launcher.close()


def test_a_run_whose_machines_do_not_come_says_how_many_did(run: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    run.config.timeouts.start_s = 0.2
    head = Head(run, monkeypatch)
    head.thread.join(PATIENCE_S)
    (error,) = head.failed
    assert isinstance(error, ConfigError) and "0 of 1 machines have joined within timeouts.start_s=0.2" in str(error)


def test_what_an_unshared_learner_saves_is_copied_and_fetched_where_its_ranks_go_on(head: Head, tmp_path: Path) -> None:
    folder = tmp_path / "there" / "checkpoints"
    begin(folder, 4)
    commit(folder, Meta(4, 0, 1), b"journal", keep=2)
    agent = FakeAgent(head.launcher, head.key)
    agent.sees = False
    agent.join()
    head.start("learner.0.0")
    (start,) = agent.beat().start
    assert start.begin is None

    stranger = FakeAgent(head.launcher, head.key, b"agent.2")
    stranger.sees = False
    stranger.join()
    stranger.made = {"checkpoints/step-9": "of a machine without ranks"}
    stranger.beat()
    opened = copy_to_head(agent, tmp_path / "there")
    assert opened.name == "checkpoints/step-4"
    until = time.monotonic() + PATIENCE_S
    while latest(head.run.folder / "checkpoints") is None:
        assert time.monotonic() < until
        stranger.beat()
        time.sleep(0.05)

    agent.socket.close()
    while head.launcher._members.by_agent.keys() != {b"agent.2"}:  # its lease is over
        stranger.beat()
        time.sleep(0.1)
    head.start("learner.0.1")
    (start,) = stranger.beat().start
    assert start.begin is not None and start.begin.timeline == TIMELINES and start.begin.files == opened.files
    for file in opened.files:
        stranger.say(Ask(file, 0))
        assert stranger.hear(Part) == opened.part(Ask(file, 0))


def copy_to_head(agent: FakeAgent, made: Path) -> Opened:
    """All parts of what it has made, as the head asks for them."""
    agent.made = made_in(made)
    agent.beat(learner_0_0=None)
    opened = Opened(made, agent.hear(Want).name)
    agent.say(Sent(opened.name, opened.files))
    for _ in opened.files:
        agent.say(opened.part(agent.hear(Ask)))
    return opened


def test_while_a_checkpoint_is_written_to_the_disk_all_leases_go_on_and_ranks_that_begin_wait_for_it(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_go_on = threading.Event(), threading.Event()
    finish = Arriving.finish

    def slow(arriving: Arriving) -> bool:
        began.set()
        assert may_go_on.wait(60)
        return finish(arriving)

    monkeypatch.setattr(Arriving, "finish", slow)
    begin(tmp_path / "there" / "checkpoints", 4)
    commit(tmp_path / "there" / "checkpoints", Meta(4, 0, 1), b"journal", keep=2)
    agent, other = (FakeAgent(head.launcher, head.key, b"agent.%d" % number) for number in (1, 2))
    agent.sees = other.sees = False
    head.launcher._members._nodes = 2
    agent.join()
    other.join()
    head.start("learner.0.0")
    engine = head.start("generator.0.0")
    copy_to_head(agent, tmp_path / "there")
    assert began.wait(PATIENCE_S)

    agent.socket.close()
    while head.launcher._members.by_agent.keys() != {b"agent.2"}:  # its lease is over
        other.beat(generator_0_0=None)
        time.sleep(0.1)
    ranks: list[Any] = []
    starting = threading.Thread(target=lambda: ranks.append(head.start("learner.0.1")))
    starting.start()
    came = set()
    until = time.monotonic() + 1.5 * LEASE_S
    while time.monotonic() < until:
        assert not other.beat(generator_0_0=None).start
        came |= {rank.came for rank in ranks}
        time.sleep(0.1)
    assert len(came) > 5, "timeouts.start_s has not begun"
    assert engine.poll() is None and not starting.is_alive()

    may_go_on.set()
    while not (orders := other.beat(generator_0_0=None)).start:
        time.sleep(0.1)
    (start,) = orders.start
    assert start.begin is not None and start.begin.name == "checkpoints/step-4", "it counts"


def test_at_the_end_all_that_was_made_is_copied_however_long_the_disk_takes(
    head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hang_s = head.run.config.timeouts.hang_s = 2.0
    finish = Arriving.finish

    def slow(arriving: Arriving) -> bool:
        time.sleep(2 * hang_s)
        return finish(arriving)

    monkeypatch.setattr(Arriving, "finish", slow)
    begin(tmp_path / "checkpoints", 4)
    commit(tmp_path / "checkpoints", Meta(4, 0, 1), b"journal", keep=2)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    write_digests(tmp_path / "model", tmp_path / "model" / DIGESTS)

    agent = FakeAgent(head.launcher, head.key)
    agent.sees = False
    agent.join()
    head.start("learner.0.0")
    agent.made = made_in(tmp_path)
    agent.beat(learner_0_0=None)
    closing = threading.Thread(target=head.launcher.close)
    closing.start()
    while not agent.serve(tmp_path, learner_0_0=0).end:
        pass
    agent.beat(leaving=True)
    closing.join(PATIENCE_S)

    assert made_in(head.run.folder) == made_in(tmp_path)
    assert "was not copied" not in capsys.readouterr().out


def offered(agent: FakeAgent, **states: int | None) -> Sent | None:
    """What an agent is to hold, as the answer to its beat says."""
    agent.beats += 1
    named = {".".join(name.rsplit("_", 2)): code for name, code in states.items()}
    agent.say(Beat(agent.beats, named, {}, agent.sees, False, agent.made))
    found = None
    while not isinstance(message := agent.hear_any(), Orders) or message.beat != agent.beats:
        found = message if isinstance(message, Sent) else found
    return found


def test_what_stands_in_the_heads_folder_is_held_by_another_machine_as_well(head: Head, tmp_path: Path) -> None:
    seeing, other, third = (FakeAgent(head.launcher, head.key, b"agent.%d" % number) for number in (1, 2, 3))
    other.sees = third.sees = False
    for agent in (seeing, other, third):
        agent.join()
    head.start("learner.0.0")
    assert seeing.beat().start and offered(other) is None, "there is none yet"

    folder = head.run.folder / "checkpoints"
    for step in (4, 8):
        begin(folder, step)
        commit(folder, Meta(step, 0, 1), f"journal of {step}".encode(), keep=1)
        sent = offered(other)
        assert sent is not None and sent.name == f"checkpoints/step-{step}"
        begin(folder, step + 1)
        commit(folder, Meta(step + 1, 0, 1), b"newer", keep=1)
        assert offered(other) == sent, "it is sent to its end, though it has no name any more"
        assert offered(seeing, learner_0_0=None) is None and offered(third) is None

        fetcher = Fetcher(tmp_path / "there", FINISH_S)
        fetcher.begin(sent.name, sent.files)
        while not (whole := fetcher.ended()):
            assert whole is None
            for ask in fetcher.asks(0.0):
                other.say(ask)
                assert fetcher.take(other.hear(Part), 0.0)
        fetcher.close()
        other.made = made_in(tmp_path / "there")
        assert read_journal(tmp_path / "there" / sent.name) == f"journal of {step}".encode()

        newer = offered(other)
        assert newer is not None and newer.name == f"checkpoints/step-{step + 1}"
        other.made = {newer.name: newer.digest}
        assert offered(other) is None


def test_what_is_asked_of_ranks_that_do_not_see_it_is_told_to_their_machine_and_answered(head: Head) -> None:
    folder = head.run.folder
    for step in (4, 8):
        begin(folder / "checkpoints", step)
        commit(folder / "checkpoints", Meta(step, 0, 1), b"journal", keep=2)
    agent, other = (FakeAgent(head.launcher, head.key, b"agent.%d" % number) for number in (1, 2))
    agent.sees = other.sees = False
    agent.join()
    head.start("learner.0.0")
    other.join()
    agent.made = made_in(folder)

    first, second = b'{"sets":{"learner.lr":1.0},"at":1}', b'{"undo":4,"at":2}'
    (folder / WISH).write_bytes(first)
    assert agent.beat(learner_0_0=None).wish == first and other.beat().wish == b""
    agent.changes = b'{"step":9,"sets":{"learner.lr":1.0}}\n'
    assert agent.beat(learner_0_0=None).wish == first, "it is told until it is answered"
    other.answered, other.changes = first, b"of no interest"
    other.beat()
    assert (folder / WISH).exists()
    agent.answered = first
    assert agent.beat(learner_0_0=None).wish == b"" and not (folder / WISH).exists()
    assert (folder / CHANGES).read_bytes() == agent.changes

    (folder / WISH).write_bytes(b"no wish at all")
    assert agent.beat(learner_0_0=None).wish == b"no wish at all", "the learner drops it"
    (folder / WISH).write_bytes(second)
    assert agent.beat(learner_0_0=None).wish == second
    assert [*made_in(folder)] == ["checkpoints/step-4"], "what is taken back counts no more"
    agent.made |= {"checkpoints/step-12": "made just before"}
    agent.socket.close()
    while head.launcher._members.by_agent.keys() != {b"agent.2"}:  # before it has said whether it is done
        other.beat()
        time.sleep(0.1)

    head.start("learner.0.1")
    other.answered = other.changes = b""
    orders = other.beat()
    (start,) = orders.start
    assert start.begin is not None and start.begin.name == "checkpoints/step-4"
    assert start.begin.changes == agent.changes and orders.wish == second, "it is asked for again"


def test_agents_of_the_head_before_come_back_with_what_lives_there(
    run: RunFile, capsys: pytest.CaptureFixture[str]
) -> None:
    make_curve_key(run.folder, KEY_FILE)
    key = (run.folder / KEY_FILE).read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    written = HeadFile(run.folder)
    written.write(Listens(port, 1, boot_id()))
    for number in (1, 2, 3):
        written.write(Machine(f"agent.{number}", there=True))
    written.write(Machine("agent.3", there=False))
    for name in ("broker.0.0", "generator.0.0", "env_server.0.0", "generator.0.1"):
        written.write(Began(name))

    made: list[ClusterLauncher] = []
    thread = threading.Thread(target=lambda: made.append(ClusterLauncher(run, before=read_before(run.folder))))
    thread.start()
    address = f"127.0.0.1:{port}"
    agent = FakeAgent(address, key)
    agent.say(Beat(7, {"generator.0.0": None, "generator.0.1": None}))
    agent.hear(Who)
    holds = {"generator.0.0": ["0"], "generator.0.1": ["1"]}
    agent.say(Back(8, run.run_id, 5, ["0", "1", "2"], True, b"n" * 32, holds, {"generator.0.1": 4}))
    assert agent.hear(Orders).beat == 8

    other_run, gone = FakeAgent(address, key, b"agent.2"), FakeAgent(address, key, b"agent.3")
    other_run.say(Back(1, "another", 2, [], True, b"x" * 32, {}, {}))
    gone.say(Beat(1, {}))
    assert other_run.hear(Orders).end and gone.hear(Orders).end
    late = FakeAgent(address, key, b"agent.4")
    late.say(Hello(0, [], code_hash()))

    while thread.is_alive():
        agent.beat(generator_0_0=None, generator_0_1=None)
        thread.join(0.1)
    (launcher,) = made
    found = launcher.found
    assert "not back, so their leases are over: 1" in capsys.readouterr().out
    assert launcher.is_back and {name: each.incarnation for name, each in found.items()} == {
        "broker.0": 0,
        "generator.0": 1,
        "env_server.0": 0,
    }
    assert found["generator.0"].handle.poll() is None
    assert found["broker.0"].handle.poll() == found["env_server.0"].handle.poll() == -9
    orders = agent.beat(generator_0_0=None, generator_0_1=None)
    assert orders.kill == ["generator.0.0"] and orders.held["generator.0.1"] == 4
    assert launcher._members.by_agent[b"agent.1"].free == ["2"]
    late.say(Hello(0, [], code_hash()))
    assert late.hear(Welcome).names == b"n" * 32 == run.names.key

    launcher._members.by_agent.clear()
    launcher.close()
    assert not read_before(run.folder).may_go_on, "the run has ended"


def test_where_no_agent_comes_back_the_head_says_so_after_the_lease(run: RunFile) -> None:
    make_curve_key(run.folder, KEY_FILE)
    before = Before(Listens(0, 0, boot_id()), {"agent.1"}, {"learner.0": 3})
    begun = time.monotonic()
    launcher = ClusterLauncher(run, before=before)
    assert time.monotonic() - begun >= LEASE_S and not launcher.is_back
    launcher.close()


def test_a_port_of_the_head_before_that_is_taken_is_told_in_one_line(run: RunFile) -> None:
    make_curve_key(run.folder, KEY_FILE)
    with socket.create_server(("127.0.0.1", 0)) as other:
        before = Before(Listens(other.getsockname()[1], 0, boot_id()), {"agent.1"})
        with pytest.raises(ConfigError, match="where agents look for the head: Address already in use"):
            ClusterLauncher(run, before=before)

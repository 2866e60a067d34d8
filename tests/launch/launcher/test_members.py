"""Leases and places over random histories: delays, losses, cuts, machines that join, leave and return."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from launch.launcher.members import Lease, Member, Members
from rl.config.schema import ClusterConfig

LEASE_S = 20.0
DRIFT = 1e-3  # of a clock against another: more than any has
SECONDS = st.floats(0, 12)


@given(
    beats=st.lists(st.tuples(SECONDS, SECONDS, SECONDS, st.booleans(), st.booleans()), min_size=1),
    drift=st.floats(-DRIFT, DRIFT),
)
def test_a_machine_is_taken_for_lost_only_when_its_lease_is_over(
    beats: list[tuple[float, float, float, bool, bool]], drift: float
) -> None:
    """Each beat is sent after a while, takes its time to the head, and its answer back, or is lost on the way."""
    fence_s = ClusterConfig(nodes=1, lease_s=LEASE_S).fence_s
    members = Members(1, fence_s, {})
    lease = Lease(LEASE_S, sent=0.0)
    answers: list[tuple[float, int]] = []
    now = 0.0
    members.join(0.5, b"agent", [])
    heard: list[tuple[float, int, float, bool]] = []
    for pause, there, back, arrives, returns in beats:
        now += pause
        number = lease.beat(now * (1 + drift))
        if arrives:
            heard.append((now + there, number, back, returns))

    for at, number, back, returns in sorted(heard):
        lost = members.lost(at)
        assert not lost or lease_over(lease, answers, at, drift)
        if members.heard(at, b"agent") is not None and returns:
            answers.append((at + back, number))

    end = members.by_agent[b"agent"].until if members.by_agent else None
    if end is not None:
        assert not members.lost(end) and lease_over(lease, answers, end, drift)
        assert members.lost(end + 1e-6)


def lease_over(lease: Lease, answers: list[tuple[float, int]], at: float, drift: float) -> bool:
    """Whether the agent's own clock says so, whatever has reached it by then."""
    for arrived, number in answers:
        if arrived <= at:
            lease.answered(number)
    return lease.until < at * (1 + drift)


def test_an_answer_that_comes_twice_or_late_changes_nothing() -> None:
    lease = Lease(LEASE_S, sent=0.0)
    first, second = lease.beat(1.0), lease.beat(2.0)
    lease.answered(second)
    assert lease.until == 2.0 + LEASE_S
    for number in (first, second, 99):
        lease.answered(number)
    assert lease.until == 2.0 + LEASE_S


class Placement(RuleBasedStateMachine):
    """Every process stands on one machine that is there; no GPU has two."""

    agents: Bundle[bytes] = Bundle("agents")

    def __init__(self) -> None:
        super().__init__()
        self.members = Members(3, 25.0, {"learner": [1, 2], "env_server": [3]})
        self.now = 0.0
        self.alive: dict[str, int] = {}  # and how many GPUs each wants
        self.incarnations: dict[str, int] = {}
        self.gpus: dict[bytes, set[str]] = {}

    @rule(target=agents, count=st.integers(0, 4), sees=st.booleans(), wanted=st.integers(0, 5))
    def join(self, count: int, sees: bool, wanted: int) -> bytes:
        agent = b"agent.%d" % len(self.gpus)
        self.gpus[agent] = {f"{number}" for number in range(count)}
        numbers = {each.number for each in self.members.by_agent.values()}
        member = self.members.join(self.now, agent, sorted(self.gpus[agent]), wanted)
        free = set(range(1, 99)) - numbers
        assert member.number == (wanted if wanted in free else min(free))
        member.sees = sees
        for name in self.members.away(member.number):
            assert name.startswith(("generator", "env_server"))
        return agent

    @rule(agent=agents, seconds=st.floats(0, 20))
    def heard(self, agent: bytes, seconds: float) -> None:
        self.now += seconds
        known = agent in self.members.by_agent
        assert (self.members.heard(self.now, agent) is not None) == known

    @rule(seconds=st.floats(0, 40))
    def time_goes_on(self, seconds: float) -> None:
        self.now += seconds
        for member in self.members.lost(self.now):
            for name in member.holds:
                self.alive.pop(name)

    @rule(agent=agents)
    def leave(self, agent: bytes) -> None:
        if (member := self.members.by_agent.get(agent)) is not None:
            member.leaving = True

    @rule(process=st.sampled_from(["learner.0", "learner.1", "generator.0", "generator.1", "env_server.0"]))
    def start(self, process: str) -> None:
        if any(name.startswith(process) for name in self.alive):
            return
        number = self.incarnations[process] = self.incarnations.get(process, -1) + 1
        name, gpus = f"{process}.{number}", int(process.startswith("generator"))
        room = [each for each in self.members.by_agent.values() if not each.leaving and len(each.free) >= gpus]
        member = self.members.assign(name, gpus)
        assert (member is not None) == bool(room)
        if member is not None:
            self.alive[name] = gpus
            self._check(member, process, room)

    def _check(self, member: Member, process: str, room: list[Member]) -> None:
        allowed = {"learner": {1, 2}, "env_server": {3}}.get(process.partition(".")[0], {1, 2, 3})
        if any(each.number in allowed for each in room):
            assert member.number in allowed
        if process == "learner.0" and self.incarnations[process] == 0 and not member.sees:
            assert not any(each.sees and each.number in allowed for each in room if each.number <= 3)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.alive:
            name = data.draw(st.sampled_from(sorted(self.alive)))
            del self.alive[name]
            self.members.ended(name)

    @invariant()
    def nothing_has_two_places(self) -> None:
        members = self.members.by_agent.values()
        standing = [name for each in members for name in each.holds]
        assert sorted(standing) == sorted(self.alive)
        assert all(len(each.holds[name]) == self.alive[name] for each in members for name in each.holds)
        for each in members:
            had = [gpu for gpus in each.holds.values() for gpu in gpus] + each.free
            assert sorted(had) == sorted(self.gpus[each.agent])


TestPlacement = Placement.TestCase


def test_ranks_with_gpus_fill_a_machine_and_workers_spread_over_all() -> None:
    members = Members(2, 25.0, {})
    for number in range(2):
        members.join(0.0, b"%d" % number, ["0", "1"]).sees = True
    placed = {name: members.assign(f"{name}.0", 1) for name in ("learner.0", "learner.1", "generator.0")}
    assert [each and each.number for each in placed.values()] == [1, 1, 2]

    spread = [members.assign(f"env_server.{index}.0", 0) for index in range(4)]
    assert [each and each.number for each in spread] == [2, 1, 2, 1]


@pytest.mark.parametrize(("gpus", "stand"), [(0, [3, 1, 2]), (1, [3, 3, 1])])
def test_rank_0_stands_where_the_runs_folder_is_seen_and_the_others_as_told(gpus: int, stand: list[int]) -> None:
    """Rank 0 alone writes there, so that others need not crowd it; those with GPUs stay near, while there is room."""
    members = Members(3, 25.0, {"learner": [1, 2, 3]})
    for number in (1, 2, 3):
        members.join(0.0, b"%d" % number, ["0", "1"]).sees = number == 3
    placed = [members.assign(f"learner.{rank}.0", gpus) for rank in range(3)]
    assert [each and each.number for each in placed] == stand


def test_what_came_back_with_its_machine_has_its_gpus_and_its_home() -> None:
    members = Members(1, 25.0, {})
    member = members.join(0.0, b"1", ["0", "1", "2"], 1)
    members.keep(member, "generator.0.3", ["1"])
    assert member.free == ["0", "2"] and members.away(2) == []
    members.ended("generator.0.3")
    assert sorted(member.free) == ["0", "1", "2"]


def test_a_worker_returns_to_its_machine_when_somebody_has_taken_its_place_and_a_rank_stays() -> None:
    members = Members(2, 25.0, {"learner": [2], "generator": [2]})
    members.join(0.0, b"1", []).sees = True
    members.join(0.0, b"2", []).sees = True
    members.assign("learner.0.0", 0)
    members.assign("generator.0.0", 0)
    members.heard(30.0, b"1")
    assert [each.agent for each in members.lost(30.0)] == [b"2"]

    for name in ("learner.0.1", "generator.0.1"):
        elsewhere = members.assign(name, 0)
        assert elsewhere is not None and elsewhere.number == 1
    again = members.join(31.0, b"3", [])
    assert again.number == 2 and members.away(2) == ["generator.0.1"]


def test_a_machine_that_does_not_see_the_heads_folder_holds_copies_as_long_as_it_is_there() -> None:
    members = Members(3, 25.0, {})
    for name, sees in ((b"1", True), (b"2", None), (b"3", False)):
        members.join(0.0, name, []).sees = sees
    held = members.holder()
    assert held is not None and held.agent == b"3"
    members.by_agent[b"2"].sees = False
    assert members.holder() is held, "a lower number is no reason to copy all again"

    held.leaving = True
    other = members.holder()
    assert other is not None and other.agent == b"2"
    members.by_agent.pop(b"2")
    assert members.holder() is None

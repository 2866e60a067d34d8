"""The per-turn barrier alone: in any order of joins, arrivals and ends it is lock-step and never stuck."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from rl.config.section import NoOptions
from rollout.episodes.hooks import GENERATE, STEP
from rollout.episodes.turn_barrier import TurnBarrier


class Play:
    """Members that generate and step in turn; what they are `doing`, and the rounds that each was released in."""

    def __init__(self) -> None:
        self.posted: deque[Callable[[], None]] = deque()
        self.settling: deque[Callable[[], None]] = deque()
        self.barrier: TurnBarrier = TurnBarrier(NoOptions(), self.posted.append, self.settling.append)
        self.doing: dict[int, int | None] = {}  # None: in its reset
        self.waiting: dict[int, int] = {}  # for which phase
        self.rounds: dict[int, list[tuple[int, int]]] = {}  # (round, phase)
        self.round = 0
        self.next = 0

    def join(self) -> None:
        self.doing[self.next] = None
        self.rounds[self.next] = []
        self.barrier.join(self.next)
        self.next += 1

    def arrive(self, member: int) -> None:
        """It has done what it did, and waits to do the other thing."""
        phase = STEP if self.doing.pop(member) == GENERATE else GENERATE
        self.waiting[member] = phase
        self.barrier.arrive(member, phase, partial(self.released, member, phase))

    def leave(self, member: int) -> None:
        self.doing.pop(member, None)
        self.waiting.pop(member, None)
        self.barrier.leave(member)

    def released(self, member: int, phase: int) -> None:
        if self.waiting.get(member) != phase:
            return  # it has left between the release and this
        busy = {each for each in self.doing.values() if each is not None}
        assert busy <= {phase}, "generations and steps at once"
        if not busy:
            self.round += 1
        del self.waiting[member]
        self.doing[member] = phase
        self.rounds[member].append((self.round, phase))

    def deliver(self) -> None:
        """What was posted is delivered in order, before anything that takes time."""
        (self.posted or self.settling).popleft()()

    @property
    def quiet(self) -> bool:
        return not self.posted and not self.settling

    def settle(self) -> None:
        while not self.quiet:
            self.deliver()


MOVES = ["join", "arrive", "arrive", "arrive", "leave", "deliver"]


@settings(max_examples=300)
@given(st.lists(st.tuples(st.sampled_from(MOVES), st.integers(0)), max_size=120))
def test_lock_step_without_a_deadlock(moves: list[tuple[str, int]]) -> None:
    play = Play()
    for what, pick in moves:
        live = sorted(play.doing.keys() | play.waiting.keys())
        if what == "join" and len(live) < 6:
            play.join()
        elif what == "arrive" and play.doing and not play.posted:
            play.arrive(sorted(play.doing)[pick % len(play.doing)])
        elif what == "leave" and live:
            play.leave(live[pick % len(live)])
        elif what == "deliver" and not play.quiet:
            play.deliver()

        if play.quiet:
            assert play.doing or not play.waiting, "everybody waits for nobody"

    play.settle()
    for _ in range(4):  # whoever is left goes on for ever
        for member in sorted(play.doing):
            play.arrive(member)
        play.settle()
        assert play.doing or not play.waiting

    for rounds in play.rounds.values():
        numbers = [number for number, _ in rounds]
        phases = [phase for _, phase in rounds]
        assert all(later == earlier + 1 for earlier, later in pairwise(numbers))
        assert phases == ([GENERATE, STEP] * len(phases))[: len(phases)]


def test_every_member_is_in_every_round_until_it_leaves() -> None:
    play = Play()
    for _ in range(3):
        play.join()
    for turn in range(5):
        for member in (2, 0, 1):
            assert play.quiet
            play.arrive(member)
        play.settle()
        assert sorted(play.doing) == [0, 1, 2], f"phase {turn}"
    assert play.rounds[0] == play.rounds[1] == play.rounds[2] and len(play.rounds[0]) == 5


def test_one_that_leaves_is_waited_for_no_longer_and_one_that_joins_is() -> None:
    play = Play()
    play.join()
    play.join()
    play.arrive(0)
    play.settle()
    assert play.waiting == {0: GENERATE}

    play.leave(1)
    play.settle()
    assert play.doing == {0: GENERATE}

    play.join()  # 2, in its reset: the step of 0 waits for it, and goes before its generation
    play.arrive(0)
    play.settle()
    assert play.waiting == {0: STEP}

    play.arrive(2)
    play.settle()
    assert play.doing == {0: STEP} and play.waiting == {2: GENERATE}
    play.arrive(0)
    play.settle()
    assert play.doing == {0: GENERATE, 2: GENERATE}


def test_leaving_twice_or_after_the_release_is_harmless() -> None:
    play = Play()
    play.join()
    play.join()
    play.arrive(0)
    play.arrive(1)
    play.deliver()  # the release; both are posted
    play.leave(0)
    play.leave(0)
    play.settle()
    assert play.doing == {1: GENERATE} and 0 not in play.waiting


def test_those_that_begin_together_take_their_first_turn_together() -> None:
    """Tickets sent at once arrive one by one: the first one's round waits while others join, later ones do not."""
    play = Play()
    for member in range(3):
        play.join()
        play.arrive(member)
        assert not play.posted and len(play.settling) == member + 1
    play.settling.popleft()()  # the first one's time is up, but others have joined since
    assert not play.posted
    play.settle()
    assert play.doing == dict.fromkeys(range(3), GENERATE)
    for member in range(3):
        play.arrive(member)
    assert play.posted and not play.settling, "without newcomers nothing waits"

"""Which checkpoint counts, over random histories of a learner that moves between machines, and parts that get lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from launch.launcher.copies import Copies, Parts, is_known, step_of

KEEP = 2
AGENTS = [b"agent.1", b"agent.2", b""]
"""The last one: where the head's folder is seen."""


def name_of(step: int) -> str:
    return f"checkpoints/step-{step}"


class Histories(RuleBasedStateMachine):
    """A learner trains, saves, moves; each machine keeps what it has. `branch` tells apart what was trained anew."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = Copies()
        self.disks: dict[bytes, dict[int, str]] = {agent: {} for agent in AGENTS}  # the last one is the head's
        self.place = AGENTS[0]
        self.branch = 0
        self.step = 0
        self.counted = -1
        self.copying: tuple[str, str] | None = None
        self.copies.begin(self.place, self.held())

    def held(self) -> dict[str, str]:
        return {name_of(step): digest for step, digest in self.disks[b""].items()}

    @rule(steps=st.integers(1, 3))
    def save(self, steps: int) -> None:
        self.step += steps
        disk = self.disks[self.place]
        disk[self.step] = f"{self.step} of branch {self.branch}"
        for step in sorted(disk)[:-KEEP]:
            del disk[step]

    @rule(agent=st.sampled_from(AGENTS[:2]))
    def beat(self, agent: bytes) -> None:
        self.copies.offered(agent, {name_of(step): digest for step, digest in self.disks[agent].items()})

    @precondition(lambda self: self.place and self.copying is None)
    @rule()
    def want(self) -> None:
        self.copying = self.copies.wanted()

    @precondition(lambda self: self.copying is not None)
    @rule(arrives=st.booleans())
    def copy(self, arrives: bool) -> None:
        assert self.copying is not None
        name, digest = self.copying
        self.copying = None
        if not arrives:
            return
        assert self.place and digest == f"{step_of(name)} of branch {digest.split()[-1]}"
        head = self.disks[b""]
        head[step_of(name)] = digest
        for dropped in self.copies.arrived(name, digest):
            assert step_of(dropped) < step_of(name), "what is dropped is older than what counts"
            del head[step_of(dropped)]

    @rule(agent=st.sampled_from(AGENTS), always=st.booleans())
    def the_ranks_begin(self, agent: bytes, always: bool) -> None:
        """After a death; their machine may be another one."""
        always = always and bool(agent)
        anew = self.copies.begin(agent, self.held(), always=always)
        assert anew == (always or agent != self.place)
        if not anew:
            self.step = max(self.disks[agent], default=0)
            return

        self.copying = None  # what is on its way is cancelled
        counts = self.copies.counts
        self.step = step_of(counts) if counts is not None else 0
        self.branch += 1
        self.place = agent
        kept = {self.step: self.copies.held[counts]} if counts is not None else {}
        self.disks[agent] = dict(kept)
        if not agent:
            self.copies.begin(agent, self.held())

    @invariant()
    def what_counts_stands_at_the_head_and_never_goes_back(self) -> None:
        assert self.copies.held.items() <= self.held().items() or not self.copies.place
        counted = step_of(self.copies.counts or "")
        if self.copies.place:
            assert counted >= self.counted
            self.counted = counted

    @invariant()
    def only_what_the_present_ranks_have_is_wanted(self) -> None:
        if (wanted := self.copies.wanted()) is not None and self.place:
            name, digest = wanted
            assert digest.endswith(f"branch {self.branch}") or self.held().get(name) != digest
            assert step_of(name) >= step_of(self.copies.counts or "")


TestHistories = Histories.TestCase


def test_what_the_learners_machine_has_dropped_is_dropped_once_a_newer_one_counts() -> None:
    copies = Copies()
    copies.begin(b"1", {})
    copies.offered(b"1", {name_of(5): "a", name_of(10): "b", "model": "m", "secret": "s", "checkpoints/../x": "y"})
    assert copies.wanted() == (name_of(10), "b"), "the newest first"
    assert copies.arrived(name_of(10), "b") == [] and copies.counts == name_of(10)
    assert copies.wanted() == ("model", "m"), "an older checkpoint is of no use, a strange folder is not taken"
    copies.arrived("model", "m")

    copies.offered(b"1", {name_of(15): "c", name_of(10): "b", "model": "m"})
    assert copies.arrived(name_of(15), "c") == []
    copies.offered(b"1", {name_of(20): "d", name_of(15): "c", "model": "other"})
    assert copies.arrived(name_of(20), "d") == [name_of(10)]
    assert copies.wanted() == ("model", "other"), "it was made again"


def test_what_a_machine_offers_that_the_learner_has_left_is_not_wanted() -> None:
    copies = Copies()
    assert not copies.begin(b"1", {})
    copies.offered(b"1", {name_of(5): "a"})
    copies.arrived(name_of(5), "a")
    copies.offered(b"1", {name_of(5): "a", name_of(10): "b"})
    assert copies.begin(b"2", copies.held) and copies.counts == name_of(5)
    copies.offered(b"1", {name_of(5): "a", name_of(10): "b"})
    assert copies.wanted() is None
    copies.offered(b"2", {name_of(5): "a", name_of(10): "trained again"})
    assert copies.wanted() == (name_of(10), "trained again")


def test_only_names_of_what_a_learner_makes_are_known() -> None:
    assert is_known("model") and is_known("adapter") and is_known("checkpoints/step-7")
    strange = (
        "",
        "logs",
        "checkpoints",
        "checkpoints/step-7/..",
        "checkpoints/step-07",
        "checkpoints/step-",
        "../model",
    )
    assert not any(map(is_known, strange))


@given(
    sizes=st.dictionaries(st.sampled_from("abc"), st.integers(0, 50), min_size=1),
    window=st.integers(1, 5),
    fates=st.lists(st.sampled_from(["arrives", "is lost", "comes twice"]), min_size=1),
)
def test_every_part_is_taken_once_and_in_order_whatever_is_lost(
    sizes: dict[str, int], window: int, fates: list[str]
) -> None:
    parts = Parts(sizes, chunk_bytes=10, window=window, again_s=2.0)
    taken: list[tuple[str, int]] = []
    now, turn = 0.0, 0
    while not parts.done:
        now += 0.5
        for ask in parts.asks(now):
            # One connection keeps the order; after the first round nothing is lost any more.
            fate = fates[turn] if turn < len(fates) else "arrives"
            turn += 1
            for _ in range({"arrives": 1, "is lost": 0, "comes twice": 2}[fate]):
                if parts.take(*ask, now):
                    taken.append(ask)
        assert now < 1000
    assert taken == [(file, at) for file, size in sizes.items() for at in range(0, max(1, size), 10)]

"""The router's data structures against the obvious implementations."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rollout.proxy.balance import LoadTree, PriorityQueue

leaves = st.tuples(st.integers(0, 40), st.integers(0, 9), st.integers(-1, 9))


@given(st.lists(leaves, max_size=60), st.integers(1, 9))
def test_the_least_loaded_generator_with_room_is_found(updates: list[tuple[int, int, int]], need: int) -> None:
    tree = LoadTree()
    states: dict[int, tuple[int, int]] = {}
    for leaf, load, room in updates:
        tree.set(leaf, load, room)
        states[leaf] = (load, room)
    fitting = [(load, leaf) for leaf, (load, room) in states.items() if room >= need]
    found = tree.best(need)
    if not fitting:
        assert found is None
    else:
        assert found is not None and states[found][1] >= need
        assert states[found][0] == min(fitting)[0]


def test_many_light_generators_without_room_do_not_hide_the_one_with_room() -> None:
    tree = LoadTree()
    for leaf in range(1024):
        tree.set(leaf, load=leaf, room=1 if leaf != 700 else 5)
    assert tree.best(5) == 700
    for leaf in range(0, 1024, 2):  # every subtree looks promising by its lightest leaf
        tree.set(leaf, load=0, room=1)
        tree.set(leaf + 1, load=1000, room=5)
    found = tree.best(5)
    assert found is not None and found % 2 == 1


@dataclass(eq=False)
class Waiter:
    key: int
    priority: int
    queued: bool = True


@given(st.lists(st.one_of(st.integers(0, 3), st.just(None), st.just("leave")), max_size=400))
def test_the_queue_serves_by_priority_and_arrival(operations: list[int | str | None]) -> None:
    """Integers arrive with this priority, None serves the head, "leave" takes out the one that arrived last."""
    queue: PriorityQueue[Waiter] = PriorityQueue()
    waiting: list[Waiter] = []
    for key, operation in enumerate(operations):
        if isinstance(operation, int):
            waiting.append(Waiter(key, operation))
            queue.push(waiting[-1])
        elif operation == "leave" and waiting:
            waiting.pop().queued = False

        expected = min(waiting, key=lambda waiter: (waiter.priority, waiter.key), default=None)
        assert queue.head() is expected
        if operation is None and expected is not None:
            expected.queued = False
            waiting.remove(expected)

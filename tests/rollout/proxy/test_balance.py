"""The router's data structures against the obvious implementations."""

from __future__ import annotations

import random
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


OPERATIONS = ("arrive", "arrive", "serve", "leave", "return", "return renamed", "set aside", "recall")


def test_what_left_and_came_back_is_set_aside_with_its_old_entry() -> None:
    first, second = Waiter(0, 0), Waiter(1, 0)
    queue: PriorityQueue[Waiter] = PriorityQueue()
    queue.push(first)
    queue.push(second)
    second.queued = False
    second.queued = True
    queue.push(second)  # its old entry has not been at the head meanwhile

    first.queued = False
    assert queue.head() is second
    queue.set_head_aside()
    assert queue.head() is None
    queue.recall()
    assert queue.head() is second


@given(st.lists(st.sampled_from(OPERATIONS), max_size=400), st.randoms(use_true_random=False))
def test_the_queue_serves_by_priority_and_arrival(operations: list[str], pick: random.Random) -> None:
    """Whoever returns under its own key stands in its old place; under a new key in the place of that key."""
    queue: PriorityQueue[Waiter] = PriorityQueue()
    waiting: list[Waiter] = []
    away: list[Waiter] = []
    aside: list[Waiter] = []  # of those that wait

    for number, operation in enumerate(operations):
        in_line = [each for each in waiting if each not in aside]
        head = min(in_line, key=lambda waiter: (waiter.priority, waiter.key), default=None)
        assert queue.head() is head

        if operation == "arrive":
            waiting.append(Waiter(number, pick.randrange(3)))
            queue.push(waiting[-1])
        elif operation in ("serve", "leave") and head is not None:
            gone = head if operation == "serve" else pick.choice(waiting)
            gone.queued = False
            away.append(gone)
            waiting.remove(gone)
            aside = [each for each in aside if each is not gone]
        elif operation.startswith("return") and away:
            back = away.pop(pick.randrange(len(away)))
            back.queued = True
            back.key = number if operation == "return renamed" else back.key
            waiting.append(back)
            queue.push(back)
        elif operation == "set aside" and head is not None:
            queue.set_head_aside()
            aside.append(head)
        elif operation == "recall":
            queue.recall()
            aside.clear()

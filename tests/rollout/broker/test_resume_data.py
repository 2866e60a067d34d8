"""A checkpoint knows its data: others are refused, or taken from their first row, without what was open of the old."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from rl.config.alarms import AlarmsConfig
from rl.observe.alarms import Alarms
from rollout.broker.core import BrokerCore
from rollout.broker.guards import BatchGuards
from tests.rollout.broker.driver import Driver, rules

OLD = {"dataset": "100 tasks of old.jsonl, digest 0a1b"}
NEW = {"dataset": "100 tasks of new.jsonl, digest 2c3d"}


def journal(data: dict[str, str] = OLD, **changes: Any) -> dict[str, Any]:
    """At version 1, with two groups that are open."""
    driver = Driver(rules(alpha=1, **changes), data=data)
    driver.publish(0)
    driver.finish_group(0, 0)
    driver.finish_group(1, 0)
    driver.request(0)
    driver.publish(1)
    driver.finish(driver.group(2)[0], 0)
    state: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(driver.core.snapshot()))
    return state


def test_other_data_are_refused_in_a_line_that_names_both_and_the_fix() -> None:
    with pytest.raises(ValueError) as caught:
        BrokerCore(rules(alpha=1), data=NEW).restore(journal())
    assert str(caught.value) == (
        f"dataset was trained on {OLD['dataset']}, and has {NEW['dataset']}; give it the same, or set resume_data=new "
        "to begin with their first row"
    )


def test_the_same_data_may_lie_elsewhere_and_old_journals_do_not_say() -> None:
    moved = {"dataset": "100 tasks of /elsewhere/old.jsonl.gz, digest 0a1b"}
    silent = {name: value for name, value in journal().items() if name != "data"}
    for state, data in ((journal(), moved), (silent, NEW), (journal(), {})):
        resumed = Driver(rules(alpha=1), state=state, timeline=1, data=data)
        resumed.publish(1)
        assert {ticket.group_id for ticket in resumed.live.values()} == {2, 3, 4, 5}


def test_of_a_mixture_the_member_is_named_that_differs() -> None:
    both = {"a": "10 tasks, digest 11", "b": "5 tasks, digest 22"}
    with pytest.raises(ValueError, match=r"^b was trained on 5 tasks, digest 22, and has 6 tasks, digest 22; give"):
        BrokerCore(rules(alpha=1), data=both | {"b": "6 tasks, digest 22"}).restore(journal(both))
    with pytest.raises(ValueError, match=r"^b was trained on .*, and has nothing, c was trained on nothing, and has 1"):
        BrokerCore(rules(alpha=1), data={"a": both["a"], "c": "1 tasks, digest 33"}).restore(journal(both))


def test_the_same_data_in_the_order_of_another_seed_are_refused_or_begin_anew() -> None:
    state = journal(seed=3)
    with pytest.raises(ValueError) as caught:
        BrokerCore(rules(alpha=1, seed=4), data=OLD).restore(state)
    assert str(caught.value) == (
        "seed=4: the data stood in the order of seed=3; give it the same, or set resume_data=new to begin with their "
        "first row"
    )
    resumed = Driver(rules(alpha=1, seed=4), state=state, timeline=1, data=OLD, new_data=True)
    fresh = Driver(rules(alpha=1, seed=4))
    resumed.publish(1)
    fresh.publish(0)
    assert [t.task_index for t in resumed.live.values()] == [t.task_index for t in fresh.live.values()]
    assert {ticket.group_id for ticket in resumed.live.values()} == {6, 7, 8, 9}

    BrokerCore(rules(alpha=1, seed=4, steps=1), data=OLD).restore(state)  # an evaluation
    old = {name: value for name, value in state.items() if name != "seed"}  # a journal that does not say
    BrokerCore(rules(alpha=1, seed=4), data=OLD).restore(old)


def test_an_evaluation_takes_whatever_tasks_it_likes() -> None:
    BrokerCore(rules(alpha=1, steps=1), data=NEW).restore(journal())


@pytest.mark.parametrize("curriculum", ["shuffled", "success"])
@pytest.mark.parametrize("known", [True, False])
def test_new_data_begin_with_their_first_row_and_nothing_open_of_the_old(known: bool, curriculum: str) -> None:
    """Also after a journal that does not say what it has, and for a second resume. Books stay closed, no id comes
    twice, and no guard takes it for an order that began anew."""
    state = journal(curriculum=curriculum)
    if not known:
        del state["data"]
    new = rules(alpha=1, curriculum=curriculum)
    resumed = Driver(new, state=state, timeline=1, data=NEW, new_data=True)
    fresh = Driver(new)
    resumed.publish(1)
    fresh.publish(0)
    assert resumed.samples("issued") == 4 + len(resumed.live) and resumed.samples("trained") == 4
    assert [t.task_index for t in resumed.live.values()] == [t.task_index for t in fresh.live.values()]
    assert {ticket.group_id for ticket in resumed.live.values()} == {6, 7, 8, 9}

    raised: list[str] = []
    guards = BatchGuards(new, Alarms(AlarmsConfig(), lambda name, _: raised.append(name)))
    guards.restored(resumed.core)
    again = Driver(new, state=resumed.core.snapshot(), timeline=2, data=NEW, new_data=True)
    guards.restored(again.core)
    assert raised == []
    again.publish(1)
    assert {t.group_id: t.task_index for t in again.live.values()} == {
        t.group_id: t.task_index for t in resumed.live.values()
    }, "they are its own by now, so it goes on"


@pytest.mark.parametrize(
    "path",
    ["n", "seconds", "group_size", "data", "tasks", "tasks.next_group", "tasks.front", "ledger", "ledger.samples"],
)
@pytest.mark.parametrize("value", [None, "x", [1], {"a": 1}])
def test_a_journal_of_other_types_is_refused_by_name(path: str, value: Any) -> None:
    state = journal()
    *inside, last = path.split(".")
    part = state
    for name in inside:
        part = part[name]
    part[last] = value
    with pytest.raises(ValueError, match=f"the journal is damaged: .*{last}"):
        BrokerCore(rules(alpha=1), data=OLD).restore(state)

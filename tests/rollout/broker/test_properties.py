"""Random interleavings: after every event the ledger closes, nothing is stale, and work always reaches the end."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.broker.rules import Rules
from tests.rollout.broker.world import World


def hooks() -> st.SearchStrategy[list[Any]]:
    """Any of the broker's, in any order."""
    hedging = st.sampled_from([0.3, 0.9]).map(lambda quantile: {"hedging": {"quantile": quantile}})
    quarantine = st.tuples(st.sampled_from([1, 2]), st.sampled_from([0.5, 30.0])).map(
        lambda drawn: {"quarantine": dict(zip(("failures", "seconds"), drawn, strict=True))}
    )
    kinds = st.sampled_from([hedging, quarantine, st.just("batch_barrier")])
    return st.lists(kinds, max_size=3, unique=True).flatmap(lambda chosen: st.tuples(*chosen)).map(list)


@st.composite
def configurations(draw: st.DrawFn) -> Rules:
    """Small numbers, so that every limit is met."""
    group_size = draw(st.integers(1, 3))
    alpha = draw(st.sampled_from([0, 0.3, 0.5, 1, 1.5, 2, 4]))
    beyond = draw(st.sampled_from([None, None, 0, 1, 3]))

    return Rules(
        steps=draw(st.integers(1, 5)),
        groups_per_batch=draw(st.integers(1, 4)),
        group_size=group_size,
        train_tasks=draw(st.integers(1, 9)),
        alpha=alpha,
        max_staleness=None if beyond is None else math.ceil(alpha) + beyond,
        redundant_groups=draw(st.integers(0, 3)),
        redundant_episodes=draw(st.integers(0, 2)),
        hold_patience=draw(st.sampled_from([0, 1, 2, math.inf])),
        hold_deadline_s=draw(st.sampled_from([0.5, 20.0])),
        max_attempts=draw(st.integers(1, 3)),
        episode_deadline_s=draw(st.sampled_from([1.0, 600.0])),
        filter_constant_groups=draw(st.booleans()),
        max_filtered_per_step=draw(st.integers(0, 5)),
        first_episodes=draw(st.integers(0, max(0, group_size - 1))),
        priority=draw(st.sampled_from(["oldest", "freshest"])),
        curriculum=draw(st.sampled_from(["shuffled", "success"])),
        hooks=draw(hooks()),
        eval_tasks=draw(st.sampled_from([0, 0, 3])),
        max_groups_given_up=10**6,
        drain_deadline_s=1e9,  # this world may be slow, but reports all usage in the end
    )


@given(
    config=configurations(),
    seed=st.integers(0, 2**32),
    events=st.integers(0, 400),
    capacity=st.integers(1, 12),
    prefetch=st.booleans(),
)
@settings(max_examples=250)
def test_random_interleavings(config: Rules, seed: int, events: int, capacity: int, prefetch: bool) -> None:
    world = World(config, seed, capacity=capacity, prefetch=prefetch)
    for _ in range(events):
        world.step()
    world.finish_all()
    assert not world.stopped
    assert world.report is not None
    assert sorted(world.batches) == list(range(config.steps))
    assert world.report["freshness_violations"] == 0
    assert world.report["ledger_mismatches"] == 0
    assert world.report["refused_trajectories"] == world.refused

    world.ledger.check_events()

    books = world.report["ledger"]
    trained = config.steps * config.groups_per_batch * config.group_size
    assert books["samples"]["trained"] == trained == len(world.trained)
    assert books["samples"]["issued"] == sum(v for k, v in books["samples"].items() if k != "issued")
    assert not any(books["samples"][state] for state in ("queued", "running", "waiting", "batched"))
    assert books["tokens"]["generated"] == sum(v for k, v in books["tokens"].items() if k != "generated")
    assert books["tokens"]["trained"] == sum(
        sample.outcome.tokens_generated for batch in world.batches.values() for sample in batch.samples
    )

"""Limited KV memory in the timing model: the budget is kept, nothing locks, and nothing starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.generator.engines.timing import BatchModel, SimulatedOptions


def limited(kv_tokens: float, lengths: list[int], prompt: int = 10) -> tuple[BatchModel, list[tuple[str, int]]]:
    """All sequences at once, run to their ends; the events by kind and key."""
    timing = SimulatedOptions(decode_base_s=1.0, decode_per_seq_s=0.0, prefill_tokens_per_s=1e3)
    batch = BatchModel(timing, 64, kv_tokens=kv_tokens)
    for key, length in enumerate(lengths):
        batch.add(key, prompt, prompt, length)

    seen: list[tuple[str, int]] = []
    for _ in range(100_000):
        due = batch.next_event()
        if due is None:
            break
        seen += [(event.kind, event.key) for event in batch.advance(due)]
        assert batch._held + batch._running * batch._steps <= kv_tokens + 1e-6, "the budget is kept"
    return batch, seen


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(100, 400))
def test_limited_memory_delays_and_never_locks(lengths: list[int], kv_tokens: int) -> None:
    """Each fits alone (10 + 90 tokens): each comes to its end once, with one first token, whatever is pre-empted."""
    batch, seen = limited(kv_tokens, lengths)
    assert sorted(seen) == sorted((kind, key) for key in range(len(lengths)) for kind in ("first_token", "finished"))
    assert len(batch) == 0 and batch._held == pytest.approx(0, abs=1e-6)

    free, _ = limited(float("inf"), lengths)
    assert free.preempted == 0 and batch.now >= free.now - 1e-6


def test_the_newest_is_preempted_and_the_oldest_is_not_delayed() -> None:
    batch, seen = limited(100, [70, 70])
    assert batch.preempted >= 1
    assert seen[-2:] == [("finished", 0), ("finished", 1)]

    alone, _ = limited(100, [70])
    finished = limited(100, [70, 70])[0]
    assert finished.now > alone.now + 20, "what the newest held was computed again"

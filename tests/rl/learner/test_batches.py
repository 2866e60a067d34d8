"""What the learner asserts about every batch part before it trains on it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rl.learner.batches import check_batch_part
from rl.observe.alarms import RunAlarm
from rl.wire.messages import BatchPart, SampleRow
from tests.rl.learner.learner_harness import make_batch


def with_columns(batch_part: BatchPart, **columns: np.ndarray) -> BatchPart:
    return msgspec.structs.replace(batch_part, columns=batch_part.columns | columns)


def check(batch_part: BatchPart, step: int = 3, rank: int = 0, timeline: int = 0, bound: int = 1) -> None:
    check_batch_part(batch_part, step=step, rank=rank, timeline=timeline, staleness_bound=bound)


def test_the_oldest_allowed_version_passes_and_the_next_older_does_not() -> None:
    check(make_batch(3, version=2)[0])
    with pytest.raises(RunAlarm, match=r"stale-batch.*step 3 holds 8 of 8 samples .*versions \[1\].*at most 1"):
        check(make_batch(3, version=1)[0])


def test_one_stale_row_of_another_rank_is_refused() -> None:
    batch_part = make_batch(3, ranks=2)[0]
    rows = list(batch_part.rows)
    rows[-1] = msgspec.structs.replace(rows[-1], version=1)
    assert len(rows) - 1 not in batch_part.members
    with pytest.raises(RunAlarm, match=r"stale-batch.*1 of 8"):
        check(msgspec.structs.replace(batch_part, rows=rows))


def test_tokens_older_than_their_row_says_are_refused() -> None:
    batch_part = make_batch(3)[0]
    versions = batch_part.policy_version.copy()
    versions[np.flatnonzero(batch_part.loss_mask)[-1]] = 1
    with pytest.raises(RunAlarm, match=r"stale-batch.*holds 1 of 8 samples that are too old \(versions \[1\]\)"):
        check(with_columns(batch_part, policy_version=versions))


@pytest.mark.parametrize("field, value", [("step", 4), ("rank", 1), ("timeline", 7)])
def test_a_batch_part_of_another_place_is_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match="expected its batch part of step 3 in timeline 0"):
        check(msgspec.structs.replace(make_batch(3)[0], **{field: value}))


def test_a_sample_that_appears_twice_is_refused() -> None:
    batch_part = make_batch(3)[0]
    rows: list[SampleRow] = [batch_part.rows[0], *batch_part.rows[:-1]]
    with pytest.raises(RunAlarm, match=r"batch-contradicts.*twice"):
        check(msgspec.structs.replace(batch_part, rows=rows))


def test_arrays_of_the_wrong_size_are_refused() -> None:
    batch_part = make_batch(3)[0]
    with pytest.raises(RunAlarm, match=r"batch-contradicts.*token_ids"):
        check(with_columns(batch_part, token_ids=batch_part.token_ids[1:]))

"""What ranks of a replay tell the command: rows as bytes, and a fault of any of them in words."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rl.learner.credit import all_reduce
from rl.replay.lab import FirstStep
from rl.replay.ranks import on_ranks
from rl.replay.replay import Row

pytestmark = pytest.mark.slow


def two_rows(rank: int, folder: Path) -> Iterator[Row]:
    """The second one has everything that a row may have, and what both ranks know together."""
    yield Row("it", 0)
    first = FirstStep({"recorded": 0.5}, {"1": 1.0}, {"0 to 1": 1.0}, {7: -0.25}, {7: [0.1, -0.2]})
    together = float(all_reduce(torch.tensor([1.0 + rank]), "sum"))
    differing = {"loss": (0.1, None), "entropy": (None, 0.2), "kl": (0.3, "damaged")}
    yield Row("it", 1, {"sum": together, "inf": math.inf}, 3, differing, ["weight"], {"a": "b"}, first, 0.5)


def failing(rank: int, folder: Path) -> Iterator[Row]:
    """The second rank, while the first one waits for it."""
    if rank == 1:
        raise KeyError("nobody knows it")
    dist.barrier()
    yield Row("it", 0)


def dying(rank: int, folder: Path) -> Iterator[Row]:
    yield Row("it", rank)
    os._exit(1)


def test_rows_of_ranks_come_as_bytes_and_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpickled(connection: Connection) -> None:
        raise AssertionError("what a rank tells was unpickled")

    monkeypatch.setattr(Connection, "recv", unpickled)
    rows = list(on_ranks(Row, 2, "cpu", two_rows))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    alone = list(two_rows(0, Path()))
    dist.destroy_process_group()
    assert rows[1].values == {"sum": 3.0, "inf": math.inf}
    alone[1].values["sum"] = 3.0
    assert rows == alone


@pytest.mark.parametrize(
    ("main", "said"), [(failing, "KeyError: 'nobody knows it'"), (dying, "a rank of the replay died")]
)
def test_a_rank_that_fails_is_told(main: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(on_ranks(Row, 2, "cpu", main))  # type: ignore[arg-type]

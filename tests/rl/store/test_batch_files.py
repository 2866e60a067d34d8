"""Batches kept on disk come back with the same bytes, or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from experiments.bench._measuring import random_batch_part
from rl.config.damage import Damaged
from rl.store.batch_files import read_batch_part, write_batch_part
from rl.wire.messages import encode


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    batch_part = random_batch_part(2, 2, 4, (2, 6), 100)
    write_batch_part(tmp_path, batch_part)
    assert encode(read_batch_part(tmp_path, batch_part.step, batch_part.rank)) == encode(batch_part)

    (path,) = (tmp_path / "batches").iterdir()
    whole = path.read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 100):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(Damaged, match=f"{path} is damaged"):
            read_batch_part(tmp_path, batch_part.step, batch_part.rank)
    path.write_bytes(whole[:-1])
    with pytest.raises(Damaged, match="damaged"):
        read_batch_part(tmp_path, batch_part.step, batch_part.rank)

"""Batches kept on disk come back with the same bytes, or not at all."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from experiments.bench._measuring import random_shard
from rl.store.batch_files import read_shard_file, write_shard_file
from rl.wire.messages import ProtocolError, encode


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path) -> None:
    shard = random_shard(2, 2, 4, (2, 6), 100)
    write_shard_file(tmp_path, shard)
    assert encode(read_shard_file(tmp_path, shard.step, shard.rank)) == encode(shard)

    (path,) = (tmp_path / "batches").iterdir()
    whole = path.read_bytes()
    for place in random.Random(0).sample(range(len(whole)), 100):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(ProtocolError, match=f"{path} was damaged"):
            read_shard_file(tmp_path, shard.step, shard.rank)
    path.write_bytes(whole[:-1])
    with pytest.raises(ProtocolError, match="damaged"):
        read_shard_file(tmp_path, shard.step, shard.rank)

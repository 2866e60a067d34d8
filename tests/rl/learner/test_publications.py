"""Which timeline a version has, when a learner that was killed publishes it again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rl.config.schema import load_config
from rl.learner.publications import Publications
from rl.learner.run_client import RunClient
from rl.weights.channel import WeightsError
from rl.wire.messages import Version


def test_bytes_that_come_out_the_same_keep_their_timeline(tmp_path: Path) -> None:
    first = Publications(tmp_path, timeline=3)
    assert [first.add(n, 100 + n) for n in range(4)] == [Version(3, n) for n in range(4)]

    again = Publications(tmp_path, timeline=3)
    assert (again.timeline, again.newest) == (3, 3)
    assert [again.add(n, 100 + n) for n in (1, 2)] == [Version(3, 1), Version(3, 2)]
    assert again.newest == 3, "the generators have it already"
    assert again.add(3, 999) == Version(4, 3) and again.add(4, 104) == Version(4, 4)


def test_where_nobody_knows_a_checksum_a_learner_that_comes_back_begins_a_new_timeline(tmp_path: Path) -> None:
    first = Publications(tmp_path, timeline=0)
    assert [first.add(n, None) for n in range(4)] == [Version(0, n) for n in range(4)]

    for death in (1, 2):
        again = Publications(tmp_path, timeline=0)
        assert [again.add(n, None) for n in (1, 2, 3, 4)] == [Version(death, n) for n in (1, 2, 3, 4)]
        assert again.newest == 4


def test_with_neither_checksum_nor_probe_nothing_is_published() -> None:
    config = load_config(None, ["weights.transport=mine:CHANNEL", "weights.probe=false", "learner.kind=fsdp"])
    sender = SimpleNamespace(offer=lambda n, pieces: None, receipt=lambda n: None)
    fields = {"_sender": sender, "_broker": object(), "_service": object()}
    client = SimpleNamespace(config=config, process=SimpleNamespace(busy=True), **fields)
    with pytest.raises(WeightsError, match=r"'mine:CHANNEL' knows no checksum.*set weights.probe=true"):
        RunClient.publish(cast(Any, client), 0, [])

"""The channel of docs/adding-a-channel.md is complete: it works as it stands there, in a folder of its user's own."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import torch

from rl.weights import make_receiver, make_sender
from rl.weights.channel import Entry, Placement
from rl.wire.messages import Version
from rl.wire.process import WaitExpired
from tests.conftest import MakeRun

DOCUMENT = Path(__file__).parents[3] / "docs" / "adding-a-channel.md"
ENTRIES: list[Entry] = [("embed", (10, 3), "bfloat16"), ("scalar", (), "float32")]
RANKS = 2


@pytest.fixture
def transport(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (code,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "my_channel.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "my_channel", raising=False)
    importlib.invalidate_caches()
    return "weights.transport=my_channel:FILES"


def test_it_brings_what_was_announced(make_run: MakeRun, transport: str) -> None:
    run = make_run(transport, f"learner.ranks={RANKS}")
    senders = [make_sender(run, rank, ENTRIES) for rank in range(RANKS)]
    receiver = make_receiver(run, "generator-0-0", 0)
    whole = torch.arange(30).view(10, 3).float()

    for n in range(7):
        scalar = ("scalar", torch.tensor(float(n)), Placement(()))
        first = ("embed", whole[:6] + n, Placement((10, 3)))
        senders[0].offer(n, [first, scalar])
        with pytest.raises(WaitExpired):
            receiver.take(Version(0, n), 0.02)
        senders[1].offer(n, [("embed", whole[6:] + n, Placement((10, 3), 6))])
        assert senders[0].receipt(n) is None
        senders[0].announce(Version(0, n))

    version, tensors = receiver.take(Version(0, 3), 10)
    arrived = dict(tensors)
    assert version == Version(0, 6) and receiver.receipt() is None and receiver.release()
    assert torch.equal(arrived["embed"], (whole + 6).bfloat16()) and arrived["scalar"] == 6
    assert not (run.folder / "weights.0.0").exists(), "old versions are removed"

"""A column for the forward, and a model that does not read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.config.schema import load_config
from rl.learner.trainer import Trainer
from rl.wire.columns import COLUMNS, Column
from tests.rl.learner.tiny_policies import save_tiny


def test_a_column_that_no_forward_reads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny(tmp_path)
    monkeypatch.setitem(COLUMNS, "routed", Column("routed", "uint16", covers="context", reads="forward"))
    with pytest.raises(ValueError, match="'routed' says reads='forward', and the forward of Policy does not read it"):
        Trainer(load_config(None, ["model.dtype=float32"]), folder, last_step=1)

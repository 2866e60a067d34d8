"""A checkpoint that somebody else made runs no code, whatever its files hold."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from rl.learner import checkpoint
from rl.store.checkpoint_folder import CheckpointError, Meta
from tests.rl.learner.test_checkpoint import one_rank as one_rank
from tests.rl.learner.test_checkpoint import trained_model


class Runs:
    """Makes a folder when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = (call, arguments)

    def __reduce__(self) -> Any:
        return self._reduced


def saved(folder: Path) -> tuple[Path, dict[str, Any]]:
    model, adamw = trained_model(seed=0)
    checkpoint.save(folder, {"policy": (model, adamw)}, Meta(2, 0, 1), b"", keep=1)
    return folder / "step-2", {"policy": (model, adamw)}


@pytest.mark.parametrize("call", [Path.mkdir, exec, torch.load, getattr], ids=lambda call: call.__qualname__)
def test_an_index_that_would_run_code_is_refused(call: Callable[..., Any], one_rank: None, tmp_path: Path) -> None:
    path, trained = saved(tmp_path)
    arguments = {Path.mkdir: (tmp_path / "ran",), exec: (f"import os; os.mkdir({str(tmp_path / 'ran')!r})",)}
    (path / "state" / ".metadata").write_bytes(pickle.dumps(Runs(call, *arguments.get(call, (tmp_path, "mkdir")))))

    with pytest.raises(CheckpointError, match=r"it names .*, which would run code") as raised:
        checkpoint.load(path, trained)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", [b"pathlib", b"pathlib._local"])
def test_the_index_of_another_python_is_read(module: bytes, one_rank: None, tmp_path: Path) -> None:
    """Python 3.13 writes the second, and earlier ones do not have it."""
    path, trained = saved(tmp_path)
    index = pickle.dumps(FileSystemReader(path / "state").read_metadata(), protocol=2)
    index, found = re.subn(rb"cpathlib(\._local)?\n", b"c" + module + b"\n", index)
    assert found
    (path / "state" / ".metadata").write_bytes(index)
    assert checkpoint.load(path, trained).step == 2


def test_a_value_that_would_run_code_is_refused(one_rank: None, tmp_path: Path) -> None:
    """Values that are no tensors, such as AdamW's settings, are pickles in the files beside the index."""
    path, trained = saved(tmp_path)
    index = FileSystemReader(path / "state").read_metadata()
    place = next(place for place in index.storage_data if place.fqn.endswith("betas"))
    info = index.storage_data[place]

    evil = io.BytesIO()
    torch.save(Runs(Path.mkdir, tmp_path / "ran"), evil)
    file = path / "state" / info.relative_path
    info.offset, info.length = file.stat().st_size, len(evil.getvalue())
    file.write_bytes(file.read_bytes() + evil.getvalue())
    (path / "state" / ".metadata").write_bytes(pickle.dumps(index))

    with pytest.raises(CheckpointError, match="cannot be loaded"):
        checkpoint.load(path, trained)
    assert not (tmp_path / "ran").exists()

"""Cuts connections of this process: those of the test that asks for it, and of no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from experiments.chaos import inject


@pytest.fixture
def only_new_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cut_connection` finds only what is connected later: connections of other tests live in this process too."""
    find = inject._sockets
    before = {_inode(descriptor) for descriptor in find(os.getpid())}

    def new(pid: int) -> Iterator[int]:
        return (descriptor for descriptor in find(pid) if _inode(descriptor) not in before)

    monkeypatch.setattr(inject, "_sockets", new)


def _inode(descriptor: int) -> str:
    """Unlike a descriptor's number it is not used again."""
    try:
        return os.readlink(Path(f"/proc/self/fd/{descriptor}"))
    except OSError:  # closed meanwhile
        return ""

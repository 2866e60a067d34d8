"""Errors that a user reads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def raises_one_line(kind: type[Exception], *parts: str) -> Iterator[None]:
    """The block raises `kind` with a message of one line that has these parts."""
    with pytest.raises(kind) as error:
        yield
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message

"""Which errors end a run, and which are the death of one process."""

from __future__ import annotations

import errno

import pytest

from rl.config.failures import ends_run
from rl.store.checkpoint_folder import CheckpointError
from rl.wire.process import WaitExpired


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (OSError(errno.ENOSPC, "full"), True),
        (OSError(errno.EDQUOT, "quota"), True),
        (OSError(errno.EROFS, "read-only"), True),
        (CheckpointError("damaged"), True),
        (WaitExpired("nobody came"), True),
        (OSError(errno.ECONNRESET, "reset"), False),
        (MemoryError(), False),
        (RuntimeError("anything"), False),
    ],
    ids=str,
)
def test_what_every_successor_would_meet_again_ends_the_run(error: BaseException, ends: bool) -> None:
    assert ends_run(error) is ends

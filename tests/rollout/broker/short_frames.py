"""The broker where a frame has room for one trajectory's columns, and not for a batch's."""

from __future__ import annotations

from rl.wire import codec
from rollout.broker.process import main

if __name__ == "__main__":
    codec.MAX_FRAME_BYTES = codec.PIECE_BYTES = 32
    main()

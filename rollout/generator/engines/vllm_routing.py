"""vLLM's store of routed experts on a GPU, with room for those of requests that were aborted.

vLLM gives it as many blocks as its KV cache has. An aborted request's blocks of the cache go to other requests at once,
and those of the store not before the steps that had begun have ended. With a full cache the store then has no room for
the others, and vLLM ends its engine. In the long run the store fills: 384 bytes a token at Qwen3-30B-A3B, twice.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.aux_output_connector.store import BlockObjectStore

_BLOCKS_FOR_EACH = 2
"""1.25 were too few in two of twelve simulated engines, and one in five of twelve; two never were."""


def make_room_for_the_aborted() -> None:
    """To be called once in a process, before an engine makes its store."""
    store_class: Any = BlockObjectStore
    made = store_class.__init__

    def with_room(store: Any, *, max_bytes: int, object_nbytes: int) -> None:
        made(store, max_bytes=_BLOCKS_FOR_EACH * max_bytes, object_nbytes=object_nbytes)

    store_class.__init__ = with_room

"""The store of routed experts that an engine on a GPU keeps: vLLM's own, as the worker's module leaves it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

STORES = """
from vllm.distributed.aux_output_connector.store import BlockObject, BlockObjectStore

def used():
    store = BlockObjectStore(max_bytes=4 * 16, object_nbytes=16)  # as many blocks as the cache has

    def begin(*keys):
        store.put([BlockObject(key, bytes(16)) for key in keys], retain_keys=keys)

    begin(*"abcd")
    begin(*"efgh")  # these have the blocks of the cache that the first ones, aborted, gave back
    store.put([], release_keys="abcd")
    begin(*"ijkl")
    return len(store.get_concatenated([*"efgh"]))

try:
    print(used())
except RuntimeError as error:
    print(error)
import rollout.generator.engines.vllm_worker
print(used())
"""


def test_what_was_aborted_leaves_room_for_the_others() -> None:
    told = subprocess.run([sys.executable, "-c", STORES], capture_output=True, text=True, check=True).stdout
    before, after = told.splitlines()
    assert "cannot retain the requested batch" in before and after == "64"

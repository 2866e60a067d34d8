"""On a CPU vLLM asks for an engine process that begins anew, and would import for seconds what is already here."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from rl.wire.cpu import FORKED_VARIABLE


def begin_as_copy(engine_processes: int, in_child: Callable[[], None]) -> None:
    """To be called before vLLM starts its processes: one that is alone then begins as a copy of this one, and with
    `in_child`.

    A copy is as good where this process is one of a fork server: no thread of OpenMP has run in it. More threads, or
    workers below the engine, need the environment of a new process.
    """
    if os.environ.get(FORKED_VARIABLE) and torch.get_num_threads() == 1 == engine_processes:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        os.register_at_fork(after_in_child=in_child)

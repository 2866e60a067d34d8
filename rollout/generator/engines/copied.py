"""vLLM is imported once: its other processes begin as copies of this one, in the place of importing it for seconds.

* On a CPU that is so for one engine process, where this one is a copy of a fork server.
* On GPUs the plan asks for it (`environment.py`). A copy of a process that has begun to use CUDA cannot use it. So a
  copy is asked first; vLLM's front end leaves CUDA alone, and asks NVML about devices.
* Threads of OpenMP are not copied, so there may be none: torch has one thread.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from vllm.model_executor.models import registry

from rl.models.families import read_config
from rl.wire.cpu import FORKED_VARIABLE
from rollout.generator.engines.environment import HOW_TO_BEGIN

_LOOK_S = 0.01
_PATIENCE_S = 120.0  # a model of vLLM is imported


def may_be_copies(engine_processes: int) -> bool:
    """Whether vLLM's processes may begin as copies of this one."""
    asked = os.environ.get(HOW_TO_BEGIN) == "fork"
    forked = bool(os.environ.get(FORKED_VARIABLE)) and engine_processes == 1
    return torch.get_num_threads() == 1 and (asked or forked)


def know_model(folder: Path) -> None:
    """vLLM asks a new process what a model can do, so that CUDA stays unused in this one, and keeps the answer among
    its caches. Where it has none yet, a copy of this process finds it there."""
    if folder.is_dir():
        _in_copy(lambda: _inspect(read_config(folder).get("architectures") or []))


def set_how_to_begin(copies: bool, device: str) -> None:
    """To be called once vLLM has its configuration, because on a CPU it asks there for processes that begin anew, and
    before it starts any. device: `cpu` or `cuda`."""
    if device == "cuda":
        copies = copies and _in_copy(lambda: not torch.cuda._is_in_bad_fork())
    os.environ[HOW_TO_BEGIN] = "fork" if copies else "spawn"


def _inspect(architectures: list[str]) -> bool:
    registry._run_in_subprocess = lambda fn: fn()
    for name in architectures:
        if (model := registry.ModelRegistry.models.get(name)) is not None:
            model.inspect_model_cls()
    return True


def _in_copy(work: Callable[[], bool]) -> bool:
    """What a copy of this process answers; False where it fails, or has not answered within its patience."""
    pid = os.fork()
    if pid == 0:
        answer = False
        try:
            answer = work()
        finally:
            os._exit(0 if answer else 1)

    until = time.monotonic() + _PATIENCE_S
    while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
            break
        time.sleep(_LOOK_S)
    return os.waitstatus_to_exitcode(ended[1]) == 0

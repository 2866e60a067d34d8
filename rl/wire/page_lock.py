"""Memory that a GPU reads and writes by itself: its pages are locked, once for each slot or tensor and process.

From memory that may be paged out the driver copies through a buffer of its own, on the CPU. That is a few GB/s, and
generation stops for as long as an update of a large model takes. Locking may be refused, by a driver that cannot lock
what is mapped for reading only, or by a limit on locked memory. Then copies go on as they would without it, and the log
says so once.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

_PORTABLE = 1  # for every context of this process
_READ_ONLY = 8


class PageLock:
    """`device`: whose copies are to be fast. On a CPU there is nothing to lock, but with a `runtime` of a test."""

    def __init__(self, device: str, runtime: Any = None) -> None:
        self._device = device
        self._runtime = runtime  # CUDA's, once it is needed: it may not be loaded before
        self._locked: dict[int, bool] = {}  # address -> whether its pages were locked

    def add(self, view: memoryview) -> None:
        """Lock the pages of `view`, unless that was tried before. It must stay mapped until `close`."""
        on_gpu = self._device.startswith("cuda")
        if not view.nbytes or not (on_gpu or self._runtime):
            return

        address = np.frombuffer(view, np.uint8).ctypes.data
        if address in self._locked:
            return

        import torch  # only here: most processes that have a channel have no GPU

        ways = [_PORTABLE | _READ_ONLY, _PORTABLE] if view.readonly else [_PORTABLE]
        with torch.cuda.device(self._device) if on_gpu else contextlib.nullcontext():
            self._runtime = self._runtime or torch.cuda.cudart()
            self._locked[address] = any(self._lock(address, view.nbytes, flags) for flags in ways)

        if not any(self._locked.values()) and len(self._locked) == 1:
            text = f"memory of {view.nbytes} bytes cannot be page-locked: copies to and from the GPU are slower"
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Unlock all of it; before it is unmapped."""
        for address, locked in self._locked.items():
            if locked:
                self._runtime.cudaHostUnregister(address)
        self._locked.clear()

    def _lock(self, address: int, size_bytes: int, flags: int) -> bool:
        if int(self._runtime.cudaHostRegister(address, size_bytes, flags)) == 0:
            return True

        import torch

        # CUDA keeps the error for whoever asks next, and torch asks after each kernel: this one is for nothing else.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._device)
        return False

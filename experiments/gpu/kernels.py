"""Where the time of a training step goes on a GPU, by torch's profiler; on a CPU by its operators."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_KINDS = {
    "attention": r"flash|fmha|sdpa|attention|attn",
    "matrix products": r"gemm|nvjet|cublas|cutlass|aten::(add|b|badd)?mm$",
    "optimizer": r"adam|multi_tensor_apply",
}
"""By what the name of a kernel holds, the first that fits; what is left is elementwise, reduced or copied."""
_LEFT = "elementwise and copies"
_LAUNCHES = re.compile(r"cu(da)?(Graph)?Launch|cudaMem(cpy|set)")
_SLOWEST = 12


def profiled(step: Callable[[], object], packs: int, device: str) -> dict[str, Any]:
    """One step, by pack: its wall seconds just before, without the profiler, seconds in which kernels ran, launches,
    and shares of these seconds. `step` waits for the device."""
    begin = time.perf_counter()
    step()
    wall_s = time.perf_counter() - begin
    on_gpu = device == "cuda"
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=kinds) as found:
        step()

    seconds: dict[str, float] = {}
    launches = 0
    for event in found.key_averages():
        on_device = event.device_type != DeviceType.CPU
        if not on_device and _LAUNCHES.match(event.key):
            launches += event.count
        if on_device == on_gpu and not event.is_user_annotation:
            spent = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            seconds[event.key] = seconds.get(event.key, 0.0) + spent / 1e6

    total = sum(seconds.values())
    shares = dict.fromkeys([*_KINDS, _LEFT], 0.0)
    for name, spent in seconds.items():
        shares[kind_of(name)] += spent / total
    slowest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:_SLOWEST]
    return {
        "wall_s": wall_s / packs,
        "busy_s": total / packs,
        "launches": launches / packs,
        "shares": shares,
        "slowest_s": {name[:80]: seconds[name] / packs for name in slowest},
    }


def kind_of(kernel: str) -> str:
    """Which kind of work a kernel does, by its name."""
    found = (kind for kind, words in _KINDS.items() if re.search(words, kernel, re.IGNORECASE))
    return next(found, _LEFT)

"""Whole experts on each rank of a tensor-parallel engine (`generator.options.expert_parallel`), on a CPU.

Of vLLM's own parts this uses what vLLM does not promise to keep; written for vllm 0.32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.platforms import current_platform


def heed_expert_map() -> None:
    """To be called before a model is built. The CPU kernel is given the number that an expert has among its rank's own.

    vLLM gives it the number among all, and it reads beyond its weights. An expert of another rank counts as the first
    one here, with a weight of 0: the sum over the ranks is then that of all experts.
    """
    if not current_platform.is_cpu():
        return

    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    CPUUnquantizedExperts.apply = _of_own_experts(CPUUnquantizedExperts.apply)  # type: ignore[method-assign]


def _of_own_experts(apply: Callable[..., None]) -> Callable[..., None]:
    def apply_own(self: Any, *, topk_weights: Any, topk_ids: Any, expert_map: Any, **arguments: Any) -> None:
        if expert_map is not None:
            own = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(own < 0, 0.0)
            topk_ids = own.clamp(min=0).to(topk_ids.dtype)
        apply(self, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **arguments)

    return apply_own

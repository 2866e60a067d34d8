"""Which experts every token that the engine reads was routed to, where vLLM itself does not tell: on a CPU.

On GPUs `enable_return_routed_experts` does this (`vllm_settings.py`); what is told is the same. A row stands for a
position, and is its routing by the weights that read it first. Where the prefix cache has a position's keys and values,
its row is that of the request that computed them. So rows are kept by slots of the cache, too.

Of vLLM's own parts this uses what vLLM does not promise to keep; written for vllm 0.32.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

_KEPT = 1024  # requests that have ended and that nobody has asked for, as those whose generator was told to stop


class RoutingCapture:
    """Of one model runner, from now on."""

    def __init__(self, runner: Any, dtype: str) -> None:
        self._runner = runner
        config = runner.model_config
        row = config.get_total_num_hidden_layers(), config.get_num_experts_per_tok()
        self._table = runner.input_batch.block_table[0]
        cache = runner.kv_cache_config
        slots = cache.num_blocks * cache.kv_cache_groups[0].kv_cache_spec.block_size
        self._slots = np.zeros((slots, *row), dtype)
        self._step = np.zeros((runner.max_num_tokens, *row), dtype)
        self._rows: dict[str, np.ndarray] = {}  # request -> rows of its positions from the first one on
        self._ended: deque[str] = deque()

        for module in runner.get_model().modules():
            if isinstance(module, MoERunner):
                module.router.set_capture_fn(partial(self._captured, module.layer_id))
        self._execute = runner.execute_model
        runner.execute_model = self._executed

    def take(self, request: str) -> np.ndarray | None:
        """(positions, layers, k) of a request that has ended; None for one that never ran."""
        return self._rows.pop(request, None)

    def _captured(self, layer: int, experts: torch.Tensor) -> None:
        self._step[: len(experts), layer] = experts.numpy()

    def _executed(self, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
        self._ended.extend(scheduled.finished_req_ids)
        while len(self._ended) > _KEPT:
            self._rows.pop(self._ended.popleft(), None)

        result = self._execute(scheduled, *args, **kwargs)
        batch = self._runner.input_batch
        begin = 0
        for index, request in enumerate(batch.req_ids):
            count = scheduled.num_scheduled_tokens.get(request, 0)
            if count:
                first = int(batch.num_computed_tokens_cpu[index])
                self._add(request, index, first, self._step[begin : begin + count])
                begin += count
        return result

    def _add(self, request: str, index: int, first: int, new: np.ndarray) -> None:
        """`new`: rows of the positions from `first` on, which have been computed just now."""
        self._slots[self._places(index, first, first + len(new))] = new
        known = self._rows.get(request)
        if known is None:
            known = self._slots[:0]
        if len(known) < first:  # the prefix cache had these
            known = np.concatenate([known, self._slots[self._places(index, len(known), first)]])
        self._rows[request] = np.concatenate([known, new[len(known) - first :]])  # what was read before stays

    def _places(self, index: int, begin: int, end: int) -> np.ndarray:
        """Slots of the cache that hold these positions."""
        positions = np.arange(begin, end)
        blocks = self._table.get_numpy_array()[index, positions // self._table.block_size]
        places: np.ndarray = blocks.astype(np.int64) * self._table.block_size + positions % self._table.block_size
        return places

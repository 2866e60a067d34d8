"""A worker that tells which of vLLM's paths its engine takes, and what each of its steps computes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from rollout.generator.engines.in_place import are_weights_as_loaded
from rollout.generator.engines.vllm_worker import LoadsWeights


class Watched(LoadsWeights):
    """All engines of a process have to have the same extension."""

    vllm_config: Any

    def writes_into_parameters(self) -> bool:
        return are_weights_as_loaded(self.model_runner)

    def path_taken(self) -> dict[str, Any]:
        """What decides on correctness and differs by device, as the engine's own process has settled it."""
        runner, config = self.model_runner, self.vllm_config
        layers = config.compilation_config.static_forward_context.values()
        attention = [layer.impl for layer in layers if hasattr(layer, "impl")]
        graphs = getattr(runner, "cudagraph_manager", None) or runner.compilation_config

        return {
            "runner": type(runner).__module__,
            "asynchronous": config.scheduler_config.async_scheduling,
            "batches at once": config.max_concurrent_batches,
            "graphs": graphs.cudagraph_mode.name,
            "attention": sorted({group.backend.get_name() for groups in runner.attn_groups for group in groups}),
            "attention version": sorted({getattr(each, "vllm_flash_attn_version", 0) for each in attention}),
            "chunked prefill": config.scheduler_config.enable_chunked_prefill,
            "prefix cache": config.cache_config.enable_prefix_caching,
        }

    def steps_watch(self) -> None:
        """Keep what every step computes, from now on."""
        self._steps: list[dict[str, int]] = []
        self._preempted: list[str] = []
        self._replayed: Counter[str] = Counter()
        runner = self.model_runner
        execute = runner.execute_model

        def executed(scheduled: Any, *args: Any, **kwargs: Any) -> Any:
            self._steps.append(dict(scheduled.num_scheduled_tokens))
            self._preempted.extend(scheduled.preempted_req_ids or ())
            return execute(scheduled, *args, **kwargs)

        runner.execute_model = executed
        if (manager := getattr(runner, "cudagraph_manager", None)) is not None:
            dispatch = manager.dispatch

            def dispatched(*args: Any, **kwargs: Any) -> Any:
                graph = dispatch(*args, **kwargs)
                self._replayed[graph.cg_mode.name] += 1
                return graph

            manager.dispatch = dispatched

    def steps_taken(self) -> dict[str, Any]:
        """Since the last call: tokens of each request in each step; who was preempted; steps by the kind of their
        graph."""
        told = {"steps": self._steps, "preempted": self._preempted, "graphs": dict(self._replayed)}
        self._steps, self._preempted = [], []
        self._replayed.clear()
        return told

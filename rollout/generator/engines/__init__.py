"""Inference engines behind one small protocol (`base.Engine`)."""

from __future__ import annotations

from rl.core.run import ProcessContext
from rollout.generator.engines.base import Engine


def make_engine(context: ProcessContext) -> Engine:
    """The engine that `generator.engine` names; imported here, because vLLM brings torch."""
    if context.run.config.generator.engine == "simulated":
        from rollout.generator.engines.simulated import SimulatedEngine

        return SimulatedEngine(context)
    from rollout.generator.engines.vllm import VllmEngine

    return VllmEngine(context)

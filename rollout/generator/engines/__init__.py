"""Inference engines behind one small protocol (`base.Engine`)."""

from __future__ import annotations

from rl.core.run import Place
from rollout.generator.engines.base import Engine


def make_engine(place: Place) -> Engine:
    """The engine that `generator.engine` names; imported here, because vLLM brings torch."""
    if place.run.config.generator.engine == "simulated":
        from rollout.generator.engines.simulated import SimulatedEngine

        return SimulatedEngine(place)
    from rollout.generator.engines.vllm import VllmEngine

    return VllmEngine(place)

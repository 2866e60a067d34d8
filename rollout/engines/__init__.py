"""Inference engines behind one small protocol (`base.Engine`)."""

from __future__ import annotations

from rl.run import Place
from rollout.engines.base import Engine


def make_engine(place: Place) -> Engine:
    """The engine that `generator.engine` names; imported here, because vLLM brings torch."""
    if place.run.config.generator.engine == "simulated":
        from rollout.engines.simulated import SimulatedEngine

        return SimulatedEngine(place)
    from rollout.engines.vllm import VllmEngine

    return VllmEngine(place)

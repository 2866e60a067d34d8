"""Inference engines behind one small protocol (`base.Engine`)."""

from __future__ import annotations

from rl.config.plugins import load
from rl.wire.run import ProcessContext
from rollout.generator.engines.base import Engine

ENGINES = {
    "simulated": "rollout.generator.engines.simulated:SimulatedEngine",
    "vllm": "rollout.generator.engines.vllm:VllmEngine",
}


def make_engine(context: ProcessContext) -> Engine:
    """The engine that `generator.engine` names; imported only now, because vLLM brings torch."""
    engine: Engine = load("generator.engine", context.run.config.generator.engine, ENGINES)(context)
    return engine

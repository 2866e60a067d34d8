"""Inference engines behind one small protocol (`base.Engine`)."""

from __future__ import annotations

from typing import Any

from rl.config.plugins import load, validated
from rl.config.schema import GeneratorConfig
from rl.wire.run import ProcessContext
from rollout.generator.engines.base import Engine
from rollout.generator.engines.environment import check_vllm

ENGINES = {
    "simulated": "rollout.generator.engines.simulated:SimulatedEngine",
    "vllm": "rollout.generator.engines.vllm:VllmEngine",
}

OPTIONS = {
    "simulated": "rollout.generator.engines.timing:SimulatedOptions",
    "vllm": "rollout.generator.engines.environment:VllmOptions",
}
"""The model of `generator.options` of each engine; it stands where no library of the engine is imported."""


def engine_options(config: GeneratorConfig) -> Any:
    """`generator.options`, as the engine's own model has them. Raises ConfigError."""
    return validated(load("generator.engine", config.engine, OPTIONS), config.options, "generator.options")


def make_engine(context: ProcessContext) -> Engine:
    """The engine that `generator.engine` names; imported only now, because vLLM brings torch. Raises ConfigError."""
    if context.run.config.generator.engine == "vllm":
        check_vllm()  # another one may lack what the import below names
    engine: Engine = load("generator.engine", context.run.config.generator.engine, ENGINES)(context)
    return engine

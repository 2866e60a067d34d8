"""`model.lora`: what is trained are adapters of low rank beside the model's weights, which stand still."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl.config.plugins import validated
from rl.config.schema import ModelConfig, Seed
from rl.config.section import Section, Where
from rl.config.tree import ConfigError

_HIGHEST_SERVED = 512  # rank of an adapter that vLLM can have
_SERVED_MERGED = {
    "experts": "get no adapters from engines",
    "lm_head": "gets no adapter from an engine that tells of prompts, as the probe asks",
}
"""Targets that engines cannot have as adapters, and why."""


class LoraOptions(Section):
    """`model.lora`, where it is given."""

    where = "model.lora"
    rank: int = Field(16, ge=1)
    """Rank of each adapter; no more than the smaller side of a layer that gets one."""
    alpha: float = Field(32.0, gt=0)
    """What an adapter adds is multiplied by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Linear layers that get one, by the last part of their names, as `q_proj`; `experts`: those of a mixture;
    `all-linear`: all but head and experts."""
    seed: Seed = 0
    """Seed of the first weights: half of an adapter is random, the other half zero."""
    start: str | None = Field(None, min_length=1)
    """Folder of adapters to go on with, as `fresco export` and peft write it; null: new ones."""
    serve: Annotated[Literal["merged", "adapter"], Where("vLLM")] = "merged"
    """What engines get: `merged` weights, or the `adapter` alone, which is a small part of the bytes and slower to
    sample with."""

    @property
    def scale(self) -> float:
        """By what an adapter's product is multiplied."""
        return self.alpha / self.rank

    @property
    def named(self) -> list[str] | None:
        """The targets by name; None: all linear layers but the head."""
        return None if isinstance(self.targets, str) else self.targets

    def identity(self) -> dict[str, Any]:
        """What tells whose adapters a checkpoint has, beside the model that they belong to."""
        targets = self.targets if isinstance(self.targets, str) else sorted(set(self.targets))
        return {"rank": self.rank, "alpha": self.alpha, "targets": targets}


def lora_options(config: ModelConfig) -> LoraOptions | None:
    """None where the whole model is trained. Raises ConfigError."""
    if config.lora is None:
        return None
    given = dict(config.lora)
    if dropout := given.pop("dropout", 0):
        raise ConfigError(
            f"model.lora.dropout={dropout!r}: engines have none, so the learner would train another policy than "
            "the one that samples; leave it out"
        )
    options: LoraOptions = validated(LoraOptions, given, "model.lora")
    if not options.targets:
        raise ConfigError("model.lora.targets=[]: name the layers, such as [q_proj, v_proj], or write all-linear")

    if options.serve == "adapter":
        _check_served(options)
    return options


def _check_served(options: LoraOptions) -> None:
    """What vLLM cannot add by itself. Raises ConfigError."""
    if options.rank > _HIGHEST_SERVED:
        raise ConfigError(
            f"model.lora.rank={options.rank}: engines have adapters of rank {_HIGHEST_SERVED} at most; lower it, or "
            "set model.lora.serve=merged"
        )
    if only := [name for name in _SERVED_MERGED if name in (options.named or ())]:
        raise ConfigError(
            f"model.lora.targets: {only[0]} {_SERVED_MERGED[only[0]]}; leave it out, or set model.lora.serve=merged"
        )


def served_adapter(config: ModelConfig) -> LoraOptions | None:
    """The options where engines are sent the adapter alone. Raises ConfigError."""
    options = lora_options(config)
    return options if options is not None and options.serve == "adapter" else None

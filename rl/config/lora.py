"""`model.lora`: what is trained are adapters of low rank beside the model's weights, which stand still."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl.config.plugins import validated
from rl.config.schema import ModelConfig, Seed
from rl.config.section import Section
from rl.config.tree import ConfigError


class LoraOptions(Section):
    """`model.lora`, where it is given."""

    where = "model.lora"
    rank: int = Field(16, ge=1)
    """Rank of each adapter; no more than the smaller side of a layer that gets one."""
    alpha: float = Field(32.0, gt=0)
    """What an adapter adds is multiplied by alpha / rank."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Linear layers that get one, by the last part of their names, as `q_proj`; `all-linear`: all but the head."""
    seed: Seed = 0
    """Seed of the first weights: half of an adapter is random, the other half zero."""

    @property
    def scale(self) -> float:
        """By what an adapter's product is multiplied."""
        return self.alpha / self.rank

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
    return options

"""The configuration's section `algo`. What must fit together is checked by `rl.learner.algorithm.make_algorithm`."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from rl.config.section import Named, Section, Where


class KLConfig(Section):
    where = "learner"
    coef: float = Field(0.0, ge=0)
    """Weight of the penalty; 0: no reference model at all."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: added to each token's loss; `reward`: taken off each token's reward, before advantages."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """One of `algos/kl.py`; k1 is the usual one in the reward, k3 in the loss."""
    reference: str = "start"
    """`start`: a frozen copy of the starting weights, or the folder of another model with the same vocabulary."""


class CriticConfig(Section):
    where = "advantage=gae"
    path: str = "start"
    """`start`: the starting weights, or the folder of another model with the same vocabulary."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate; warm-up, schedule and everything else of AdamW as in `learner`."""
    pretrain_steps: int = Field(0, ge=0)
    """First batches that train the critic only: a policy should not follow values that mean nothing yet."""
    epochs: int = Field(1, ge=1)
    """Critic's optimizer steps per minibatch."""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of the returns it regresses to; 1: the rewards that really came (https://arxiv.org/abs/2503.01491)."""
    clip: float | None = Field(None, gt=0)
    """How far values may move from those before the batch, as far as the loss can see; null: no clip."""


class CorrectionConfig(Section):
    where = "learner"
    weight: Literal["none", "token", "sequence"] = "none"
    """Truncated importance weight from the policy that sampled to the one at the batch's start, of each token or its
    sequence (`algos/correction.py`)."""
    cap: Annotated[float, Where("weight=token or sequence")] = Field(2.0, gt=0)
    """Largest weight."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens (IcePop), or samples by their ratio (MIS) or its geometric mean, outside [low, high]."""
    low: Annotated[float, Where("mask")] = Field(0.5, ge=0)
    """Least ratio that is kept."""
    high: Annotated[float, Where("mask")] = Field(2.0, gt=0)
    """Largest ratio that is kept."""


class AlgoConfig(Section):
    where = "learner"
    loss: str = "grpo"
    """A registered loss (`algos/`) or an importable `package.module:Name`."""
    columns: Annotated[list[str], Where("all processes")] = Field(default_factory=list)
    """Further columns for the loss or the forward, each the `package.module:NAME` of a `rl.wire.columns.Column`."""
    teacher: Annotated[str | None, Where("losses that read teacher_logp")] = None
    """The model that a student learns from: a folder, a hub name, or `URL#NAME` at an endpoint with vLLM's
    `prompt_logprobs`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss (clip ranges, caps), checked by its own dataclass."""
    advantage: Named | None = None
    """A registered estimator (`algos/advantages.py`) or an importable `package.module:Name`, or with options as
    `{name: {option: value}}`; null: the loss's own."""
    aggregation: Literal["token", "sequence", "constant"] | None = None
    """A minibatch's loss: mean over tokens, over samples' means, or of samples' sums over the most tokens an episode
    can have; null: the loss's own."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    mask_truncated: bool = False
    """Episodes cut by a limit count in their group's statistics, but not in the loss (https://arxiv.org/abs/2503.14476)."""
    shaping: list[Named] = Field(default_factory=list)
    """Reward shapings (`algos/rewards.py`), in this order, each by its name, or with options as
    `{name: {option: value}}`."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    critic: CriticConfig | None = None
    """Train a value head on a model of its own (PPO); `{}`: with the defaults of its section."""

    @field_validator("teacher")
    @classmethod
    def _url_and_name(cls, teacher: str | None) -> str | None:
        if teacher is not None and is_endpoint(teacher):
            url = urlsplit(teacher)  # which says itself what a port cannot be
            if url.scheme not in ("http", "https") or not url.hostname or not url.fragment or url.port == 0:
                raise ValueError("write an endpoint as URL#NAME, such as http://host:8000/v1#Qwen/Qwen3-32B")
        return teacher

    @property
    def all_columns(self) -> list[str]:
        """`columns`, and the one that a teacher fills."""
        return [*self.columns, *(["rl.wire.columns:TEACHER_LOGP"] if self.teacher else [])]


def is_endpoint(teacher: str) -> bool:
    """Whether it is asked over HTTP, as `URL#NAME`."""
    return "://" in teacher

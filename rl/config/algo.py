"""The configuration's section `algo`. What must fit together is checked by `rl.learner.algorithm.make_algorithm`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl.config.section import Section


class ShapingConfig(Section):
    name: str
    """A registered reward shaping (`algos/rewards.py`) or an importable `package.module:Name`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options, validated against its own dataclass."""


class KLConfig(Section):
    coef: float = Field(0.0, ge=0)
    """Weight of the penalty; 0: no reference model at all."""
    place: Literal["loss", "reward"] = "loss"
    """`loss`: added to each token's loss. `reward`: taken off each token's reward, before advantages."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """See `algos/kl.py`; k1 is the usual one in the reward, k3 in the loss."""
    reference: str = "start"
    """`start`: a frozen copy of the starting weights. Or the folder of another model with the same vocabulary."""


class CriticConfig(Section):
    enabled: bool = False
    """Train a value head on a model of its own (PPO); `advantage: gae` needs it."""
    path: str = "start"
    """`start`: the starting weights. Or the folder of another model with the same vocabulary."""
    lr: float = Field(1e-5, gt=0)
    """Peak learning rate; schedule and everything else of AdamW as in `learner`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    pretrain_steps: int = Field(0, ge=0)
    """First batches that train the critic only: a policy should not follow values that mean nothing yet."""
    epochs: int = Field(1, ge=1)
    """Critic's optimizer steps per minibatch."""
    lam: float = Field(1.0, ge=0, le=1)
    """lambda of the returns it regresses to; 1: the rewards that really came (https://arxiv.org/abs/2503.01491)."""
    clip: float | None = Field(None, gt=0)
    """Values move at most this far from those before the batch, as far as the loss can see; None: no clip."""


class CorrectionConfig(Section):
    weight: Literal["none", "token", "sequence"] = "none"
    """Importance weight from the policy that sampled to the learner's at the start of the batch, truncated at `cap`: of
    each token, or of its whole sequence (`algos/correction.py`). With more than one minibatch,
    anything but none costs one more forward per batch."""
    cap: float = Field(2.0, gt=0)
    """Largest weight."""
    mask: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens (IcePop), or samples by their ratio (MIS) or by its geometric mean, outside [low, high]."""
    low: float = Field(0.5, ge=0)
    """Least ratio that is kept."""
    high: float = Field(2.0, gt=0)
    """Largest ratio that is kept."""


class AlgoConfig(Section):
    loss: str = "grpo"
    """A registered loss (`algos/`) or an importable `package.module:Name`."""
    columns: list[str] = Field(default_factory=list)
    """Further columns for the loss or the forward, each the `package.module:NAME` of a `rl.wire.columns.Column`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss (clip ranges, caps), validated against its own dataclass."""
    advantage: str | None = None
    """A registered advantage estimator (`algos/advantages.py`) or an importable `package.module:Name`; None: the loss's
    own (`group` for most, `leave_one_out` for rloo)."""
    advantage_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator (discount, lam), validated against its own dataclass."""
    aggregation: Literal["token", "sequence", "constant"] | None = None
    """From tokens to the loss of a minibatch: `token` mean over tokens, `sequence` mean over samples of each one's
    mean, `constant` mean over samples of each one's sum over a constant (see `algos/aggregation.py`); None: the
    loss's own."""
    aggregation_constant: int | None = Field(None, ge=1)
    """The constant; None: the most tokens an episode can generate, sampling.max_tokens * env.max_turns."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    mask_truncated: bool = False
    """Episodes cut by a limit of length or turns count in their group's statistics, but not in the loss
    (over-long filtering, https://arxiv.org/abs/2503.14476)."""
    shaping: list[ShapingConfig] = Field(default_factory=list)
    """Reward shaping, in this order (`overlong` is DAPO's soft penalty)."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    kl: KLConfig = Field(default_factory=KLConfig)
    critic: CriticConfig = Field(default_factory=CriticConfig)

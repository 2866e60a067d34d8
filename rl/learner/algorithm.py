"""The section `algo` as callables, checked against each other and the rest of the configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from algos.advantages import Estimator, make_estimator
from algos.aggregation import Aggregation
from algos.conformance import missing_inputs
from algos.correction import Correction
from algos.registry import Loss, make_loss, registered
from algos.regularisation import Regularisation
from algos.rewards import Shaping, check_shaping, make_shaping
from rl.core.columns import BUILT_IN, COLUMNS, register_configured
from rl.core.config import Config
from rl.core.config_algo import CriticConfig, KLConfig
from rl.core.plugins import load


@dataclass(frozen=True)
class Algorithm:
    loss: Loss
    correction: Correction
    estimator: Estimator
    shapings: tuple[Shaping, ...]
    regularisation: Regularisation
    aggregation: Aggregation
    constant: int  # of the aggregation "constant"
    mask_truncated: bool
    max_tokens: int  # most tokens that an episode can generate
    reward_kl: KLConfig | None  # charged to the rewards
    reference: str | None  # `start` or a folder
    critic: CriticConfig | None

    @property
    def needs_proximal(self) -> bool:
        return self.loss.needs_proximal or self.correction.active


def make_algorithm(config: Config) -> Algorithm:
    """Raises ValueError, in one line, for unknown names and options and for settings that contradict each other."""
    algo, kl = config.algo, config.algo.kl
    register_configured(algo.columns)
    loss = make_loss(load("algo.loss", algo.loss, registered("loss")), algo.options)
    advantage = load("algo.advantage", algo.advantage or loss.spec.advantage, registered("advantage"))
    estimator = make_estimator(advantage, algo.advantage_options)
    aggregation = algo.aggregation or loss.spec.aggregation
    _check_critic(config, estimator)
    if algo.correction.low >= algo.correction.high:
        raise ValueError(
            f"algo.correction.low={algo.correction.low:g} must be below algo.correction.high={algo.correction.high:g}"
        )
    if estimator.spec.needs_group and config.rollout.group_size == 1:
        raise ValueError(
            f"algo.advantage={estimator.spec.name!r} compares members of a group and is 0 for rollout.group_size=1: "
            "raise the group size, or use 'batch' or 'gae'"
        )
    if algo.aggregation_constant is not None and aggregation != "constant":
        raise ValueError(
            f"algo.aggregation_constant={algo.aggregation_constant} has no meaning with "
            f"algo.aggregation={aggregation!r}: remove it, or set algo.aggregation=constant"
        )
    _check_folder("algo.kl.reference", kl.reference)
    _check_folder("algo.critic.path", algo.critic.path)
    if kl.reference != "start" and not kl.coef:
        raise ValueError(f"algo.kl.reference={kl.reference!r} is never used with algo.kl.coef=0: set the coefficient")
    max_tokens = config.sampling.max_tokens * config.env.max_turns
    correction = Correction(**algo.correction.model_dump())
    _check_inputs(loss, proximal=loss.needs_proximal or correction.active, reference=bool(kl.coef))
    shapings = tuple(
        make_shaping(load(f"algo.shaping.{index}.name", each.name, registered("shaping")), each.options)
        for index, each in enumerate(algo.shaping)
    )
    for shaping in shapings:
        check_shaping(shaping, max_tokens)
    charged = bool(kl.coef) and kl.place == "reward"
    return Algorithm(
        loss=loss,
        correction=correction,
        estimator=estimator,
        shapings=shapings,
        regularisation=Regularisation(0.0 if charged else kl.coef, kl.estimator, algo.entropy_coef),
        aggregation=aggregation,
        constant=algo.aggregation_constant or max_tokens,
        mask_truncated=algo.mask_truncated,
        max_tokens=max_tokens,
        reward_kl=kl if charged else None,
        reference=kl.reference if kl.coef else None,
        critic=algo.critic if algo.critic.enabled else None,
    )


def _check_inputs(loss: Loss, *, proximal: bool, reference: bool) -> None:
    columns = {name: column.shape for name, column in COLUMNS.items() if name not in BUILT_IN}
    missing = missing_inputs(loss, proximal=proximal, reference=reference, columns=columns)
    if missing:
        fixes = {
            "logp_proximal": "register it with needs_proximal=True, or set algo.correction.weight",
            "logp_reference": "set algo.kl.coef above 0",
        }
        fix = fixes.get(missing, "list the column's declaration under algo.columns (rl/core/columns.py)")
        raise ValueError(f"algo.loss={loss.spec.name!r} uses {missing}, which nothing here computes: {fix}")


def _check_folder(field: str, path: str) -> None:
    if path != "start" and not (Path(path) / "config.json").exists():
        raise ValueError(f"{field}={path!r}: no config.json in this folder; give a model's folder, or 'start'")


def _check_critic(config: Config, estimator: Estimator) -> None:
    critic, name = config.algo.critic, estimator.spec.name
    if estimator.spec.needs_values and not critic.enabled:
        raise ValueError(f"algo.advantage={name!r} needs the values of a critic: set algo.critic.enabled=true")
    if critic.enabled and not estimator.spec.needs_values:
        raise ValueError(
            f"algo.critic.enabled=true, but algo.advantage={name!r} uses no values: set algo.advantage=gae, "
            "or switch the critic off"
        )
    if critic.enabled and critic.pretrain_steps >= config.steps and config.resume is None:
        raise ValueError(
            f"algo.critic.pretrain_steps={critic.pretrain_steps} leaves none of steps={config.steps} to the policy"
        )

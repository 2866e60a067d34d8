"""The section `algo` as callables, checked against each other and the rest of the configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from algos.advantages import Estimator, make_estimator
from algos.aggregation import Aggregation
from algos.conformance import missing_inputs, untrainable
from algos.correction import Correction
from algos.registry import Loss, make_loss, registered
from algos.regularisation import Regularisation
from algos.rewards import Shaping, check_shaping, make_shaping
from rl.config.algo import CriticConfig, KLConfig, is_endpoint
from rl.config.plugins import load
from rl.config.schema import Config
from rl.config.section import split_named
from rl.wire.columns import BUILT_IN, COLUMNS, Column, register_configured

_LIST = "list the column's declaration under algo.columns (rl/wire/columns.py)"


@dataclass(frozen=True)
class Algorithm:
    """What the section `algo` means. It is made by `make_algorithm`."""

    loss: Loss
    correction: Correction
    estimator: Estimator
    shapings: tuple[Shaping, ...]
    regularisation: Regularisation
    aggregation: Aggregation
    mask_truncated: bool
    max_tokens: int  # most tokens that an episode of one context can generate
    reward_kl: KLConfig | None  # charged to the rewards
    reference: str | None  # `start` or a folder
    critic: CriticConfig | None

    @property
    def needs_proximal(self) -> bool:
        """Whether `logp_proximal` is computed."""
        return self.loss.needs_proximal or self.correction.active

    @property
    def entropy_gradient(self) -> bool:
        """Whether the entropy carries a gradient."""
        return self.loss.spec.entropy_gradient or self.regularisation.entropy_gradient


def make_algorithm(config: Config) -> Algorithm:
    """Raises ValueError, in one line, for unknown names and options and for settings that contradict each other."""
    algo = config.algo
    kl = algo.kl
    register_configured(algo.all_columns)
    loss = make_loss(load("algo.loss", algo.loss, registered("loss")), algo.options)
    advantage, chosen = split_named(algo.advantage or loss.spec.advantage)
    estimator = make_estimator(load("algo.advantage", advantage, registered("advantage")), chosen)
    max_tokens = config.episode_tokens
    shapings = tuple(
        make_shaping(load(f"algo.shaping.{index}", name, registered("shaping")), options)
        for index, (name, options) in enumerate(map(split_named, algo.shaping))
    )

    charged = bool(kl.coef) and kl.place == "reward"

    algorithm = Algorithm(
        loss=loss,
        correction=Correction(**algo.correction.model_dump()),
        estimator=estimator,
        shapings=shapings,
        regularisation=Regularisation(0.0 if charged else kl.coef, kl.estimator, algo.entropy_coef),
        aggregation=algo.aggregation or loss.spec.aggregation,
        mask_truncated=algo.mask_truncated,
        max_tokens=max_tokens,
        reward_kl=kl if charged else None,
        reference=kl.reference if kl.coef else None,
        critic=algo.critic,
    )

    for wrong, message in chain(_contradictions(config, algorithm), _of_teacher(config, loss)):
        if wrong:
            raise ValueError(message)
    for shaping in shapings:
        check_shaping(shaping, max_tokens)
    return algorithm


def _contradictions(config: Config, algorithm: Algorithm) -> Iterator[tuple[bool, str]]:
    """What must not be, and what is said then."""
    algo = config.algo
    critic = algo.critic
    advantage = algorithm.estimator.spec
    field = f"algo.advantage={advantage.name!r}"

    yield (
        advantage.needs_values and critic is None,
        f"{field} needs the values of a critic: set algo.critic={{}}, or its options",
    )

    if critic is not None:
        yield (
            not advantage.needs_values,
            f"there is algo.critic, but {field} uses no values: set algo.advantage=gae, or algo.critic=null",
        )
        yield (
            critic.pretrain_steps >= config.steps and config.resume is None,
            f"algo.critic.pretrain_steps={critic.pretrain_steps} leaves none of steps={config.steps} to the policy",
        )

    low = algo.correction.low
    high = algo.correction.high
    yield low >= high, f"algo.correction.low={low:g} must be below algo.correction.high={high:g}"
    yield (
        advantage.needs_group and config.rollout.group_size == 1,
        f"{field} compares members of a group and is 0 for rollout.group_size=1: raise the group size, or use 'batch' "
        "or 'gae'",
    )

    others = {"algo.kl.reference": algo.kl.reference, "algo.critic.path": critic.path if critic else "start"}
    for name, path in others.items():
        missing = path != "start" and not (Path(path) / "config.json").exists()
        yield missing, f"{name}={path!r}: no config.json in this folder; give a model's folder, or 'start'"
    yield (
        algo.kl.reference != "start" and not algo.kl.coef,
        f"algo.kl.reference={algo.kl.reference!r} is never used with algo.kl.coef=0: set the coefficient",
    )

    loss = algorithm.loss
    reference = bool(algo.kl.coef)
    unknown = missing_inputs(loss, proximal=algorithm.needs_proximal, reference=reference, columns=_shapes())
    fixes = {
        "logp_proximal": "register it with needs_proximal=True, or set algo.correction.weight",
        "logp_reference": "set algo.kl.coef above 0",
        "teacher_logp": f"{_LIST}, or name the model of a teacher in algo.teacher",
    }
    fix = fixes.get(unknown, _LIST)
    yield bool(unknown), f"algo.loss={loss.spec.name!r} uses {unknown}, which nothing here computes: {fix}"
    wrong = untrainable(loss, _shapes())
    yield bool(wrong), f"algo.loss={loss.spec.name!r}: {wrong}; fresco check-loss tries it in seconds"


def _of_teacher(config: Config, loss: Loss) -> Iterator[tuple[bool, str]]:
    """What must not be of `algo.teacher`."""
    teacher = config.algo.teacher
    for named in config.algo.columns:
        column: Column = load("algo.columns", named, {})
        filled = column.producer != "teacher" or (teacher is not None and column.name == "teacher_logp")
        yield (
            not filled,
            f"algo.columns={named!r}: nothing fills it; name a teacher in algo.teacher, which fills its own",
        )
    if teacher is None:
        return

    others = {name: shape for name, shape in _shapes().items() if name != "teacher_logp"}
    read = missing_inputs(loss, proximal=True, reference=True, columns=others) == "teacher_logp"
    yield (
        not read,
        f"algo.teacher={teacher!r} is never asked with algo.loss={loss.spec.name!r}: set algo.loss=reverse_kl",
    )
    yield (
        is_endpoint(teacher) and config.sampling.temperature != 1,
        f"algo.teacher={teacher!r}: an endpoint tells log-probabilities at temperature 1 only; set "
        "sampling.temperature=1, or give the teacher's folder",
    )


def _shapes() -> dict[str, tuple[int, ...]]:
    """The shape of an entry of each registered column. Where the model is not known yet, one stands for its numbers."""
    further = [column for name, column in COLUMNS.items() if name not in BUILT_IN]
    return {each.name: tuple(1 if isinstance(size, str) else size for size in each.shape) for each in further}

"""Environment families by name, and the checks that run before any process starts.

A family is loaded lazily: naming one environment never imports another's libraries. Anything else importable as
`package.module:Name` works without registration.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from rl.config.plugins import load, own_place, told, validated
from rl.config.schema import Config, ConfigError
from rollout.episodes.environment import EnvironmentFamily, Needs

FAMILIES = {
    "alfworld": "envs.alfworld.environment:AlfworldFamily",
    "code": "envs.code.environment:CodeFamily",
    "dataset": "envs.dataset.environment:DatasetFamily",
    "gymnasium": "envs.gymnasium.environment:GymnasiumFamily",
    "math": "envs.math.environment:MathFamily",
    "mini_swe": "envs.agents.mini_swe:MiniSweFamily",
    "mixture": "envs.mixture:MixtureFamily",
    "openenv": "envs.openenv.environment:OpenEnvFamily",
    "reasoning_gym": "envs.reasoning_gym.environment:ReasoningGymFamily",
    "sdk_agent": "envs.agents.sdk_agent:SdkAgentFamily",
    "swe": "envs.swe.environment:SweFamily",
    "synthetic": "envs.synthetic:SyntheticFamily",
    "tool_loop": "envs.agents.tool_loop:ToolLoopFamily",
}
GOLD = "envs.gold:demonstrate"  # of environments that know how their tasks are solved
DEMONSTRATORS = {
    "alfworld": "envs.alfworld.demonstrations:demonstrate",
    "dataset": GOLD,
    "gymnasium": GOLD,
    "math": GOLD,
    "mini_swe": "envs.agents.mini_swe:demonstrate",
    "mixture": GOLD,
    "reasoning_gym": GOLD,
    "sdk_agent": "envs.agents.sdk_agent:demonstrate",
    "swe": "envs.swe.demonstrations:demonstrate",
    "tool_loop": "envs.agents.tool_loop:demonstrate",
}


def load_family(name: str) -> type[EnvironmentFamily]:
    """The class registered as `name`, or importable as `package.module:Name`. Raises ConfigError."""
    family: type[EnvironmentFamily] = load("env.name", name, FAMILIES)
    if not hasattr(family, "Options"):
        raise ConfigError(f"env.name={name!r} has no Options and is no EnvironmentFamily")
    return family


def demonstrator(name: str) -> Any:
    """The coroutine function that plays an environment's training tasks (`model.warm_start`). Raises ConfigError."""
    if name not in DEMONSTRATORS:
        known = ", ".join(DEMONSTRATORS)
        raise ConfigError(f"model.warm_start.demonstrations: env.name={name!r} has no demonstrator ({known} has)")
    return load("env.name", name, DEMONSTRATORS)


def make_family(config: Config) -> EnvironmentFamily:
    """The configured family with its `eval.sets`, its options validated and its tasks loaded; nothing is started.

    Raises ConfigError.
    """
    own = own_family(config)
    with_sets = resolve_name("envs.held_out_sets:with_sets") if config.eval.sets else None  # it imports this module
    return with_sets(config, own) if with_sets else own


def own_family(config: Config) -> EnvironmentFamily:
    """Likewise without its `eval.sets`: what demonstrators play."""
    family = load_family(config.env.name)
    options = validated(family.Options, config.env.options, "env.options")
    return made(config.env.name, family, options, config.seed)


def made(name: str, family: type[EnvironmentFamily], options: Any, seed: int) -> EnvironmentFamily:
    """The family of these options. Raises ConfigError where they, or what they name, cannot be used."""
    try:
        return family(options, seed)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(f"env.options of env.name={name!r}: {error}") from error
    except Exception as error:
        if not own_place(error):  # a fault of ours keeps its traceback
            raise
        raise ConfigError(f"env.options of env.name={name!r}: {told(error)}") from error


def validate_options(config: Config) -> Any:
    """`env.options`, checked by themselves and against `env`; nothing is loaded. Raises ConfigError, one line."""
    family = load_family(config.env.name)
    options = validated(family.Options, config.env.options, "env.options")
    if hasattr(family, "needs"):
        _check_needs(family.needs(options), config)
    return options


def _check_needs(needs: Needs, config: Config) -> None:
    env = config.env
    if env.max_turns < needs.turns:
        raise ConfigError(
            f"env.max_turns={env.max_turns}: no task of env {env.name!r} is solved in fewer than {needs.turns} turns; "
            "set it to the turns that an agent may take, such as 30"
        )

    episode_s = config.rollout.episode_deadline_s
    for name, deadline_s in ("env.step_deadline_s", env.step_deadline_s), ("rollout.episode_deadline_s", episode_s):
        if deadline_s <= needs.step_s:
            raise ConfigError(
                f"{name}={deadline_s:g}: a step may take {needs.step_s:g} s ({needs.why}); set it above that, or lower "
                "these options"
            )

    if config.sampling.max_tokens < needs.tokens:
        raise ConfigError(
            f"sampling.max_tokens={config.sampling.max_tokens}: env.options asks for turns of {needs.tokens} tokens; "
            "raise it, or lower that option"
        )
    if needs.episodes is not None and env.episodes_per_server > needs.episodes:
        raise ConfigError(
            f"env.episodes_per_server={env.episodes_per_server}: more than {needs.room}, and the others would run past "
            "env.step_deadline_s while they wait; lower it, or raise that option"
        )


def validate_env(config: Config, dry: bool = False) -> tuple[int, int, EnvironmentFamily | None]:
    """What the preflight asks for: train tasks, eval tasks, and the family. Raises ConfigError, one line.

    `dry`: nothing is made; a family whose tasks take long to make says how many there will be, in `planned(options)`.
    """
    kind = load_family(config.env.name)
    options = validate_options(config)
    alone = dry and not config.eval.sets
    planned = kind.planned(options) if alone and hasattr(kind, "planned") else None
    family = None
    if planned is None:
        family = make_family(config)
        planned = {split: family.task_count(split) for split in ("train", "eval")}

    train = planned["train"]
    held_out = planned["eval"]
    if train < 1:
        raise ConfigError(f"env {config.env.name!r} has no training task")
    if config.eval.tasks > held_out:
        raise ConfigError(f"eval.tasks={config.eval.tasks}: env {config.env.name!r} has only {held_out} held-out tasks")
    return train, held_out, family

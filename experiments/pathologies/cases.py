"""The pathologies: what is run, what is wrong with it, and which alarms may name it."""

from __future__ import annotations

from dataclasses import dataclass

SIMULATED = (  # what one case needs stands in all of them, or it would tell
    "env.name=experiments.unnamed_tasks:Rows0",
    "env.step_deadline_s=2.5",
    "max_restarts=1000",
    "eval.tasks=16",
    "tracking.samples=0.5",
    "learner.options.step_s=0.2",
    "env.servers=3",
    "env.options.mean_s=0.05",
    "env.options.sigma_s=0.02",
)
LEARNING = (
    "env.name=experiments.unnamed_tasks:Words0",
    "steps=24",
    "eval.tasks=64",
    "eval.every=12",
    "generator.count=1",
    "learner.ranks=1",
    "tracking.samples=0.5",
    "tracking.wandb=disabled",
)


@dataclass(frozen=True)
class Case:
    """`alarms`: any of them names it. `spoilt`: (role, index, what) of a process that is spoilt."""

    name: str
    what: str
    recipe: str
    overrides: tuple[str, ...]
    alarms: tuple[str, ...]
    spoilt: tuple[str, int, str] | None = None
    template: str = ""
    """A template in the place of the model's own chat template."""


_FOREIGN = "{% for message in messages %}### {{ message.role }}: {{ message.content }}\n{% endfor %}<|im_end|>"

CASES = (
    Case(
        "slow-server",
        "one of three environment servers takes a second longer for each step",
        "simulated",
        (*SIMULATED, "steps=30"),
        ("slow-server",),
        spoilt=("env_server", 1, "slow_server"),
    ),
    Case(
        "dead-generator",
        "one of two generators dies four seconds after each start",
        "simulated",
        (*SIMULATED, "env.name=experiments.unnamed_tasks:Rows2", "steps=60"),
        ("process-died",),
        spoilt=("generator", 1, "dead_generator"),
    ),
    Case(
        "weights-not-delivered",
        "the engine reads every update and keeps the weights that it began with",
        "math_cpu",
        LEARNING,
        ("weights-differ", "log-ratio", "off-policy"),
        spoilt=("generator", 0, "undelivered"),
    ),
    Case(
        "learning-rate",
        "a learning rate ten times too high",
        "math_cpu",
        (*LEARNING, "env.name=experiments.unnamed_tasks:Words2", "learner.lr=1e-3"),
        ("large-steps", "off-policy", "entropy", "no-diversity"),
    ),
    Case(
        "chat-template",
        "the chat template of another family of models",
        "math_cpu",
        LEARNING,
        ("judge-never", "unreadable", "truncated", "template-drift", "double-start"),
        template=_FOREIGN,
    ),
    Case(
        "type-without-reward",
        "the judge passes no problem of one kind",
        "math_cpu",
        (*LEARNING, "env.name=experiments.unnamed_tasks:Words1"),
        ("task-type-never",),
    ),
    Case(
        "hanging-task",
        "one task in forty never answers",
        "simulated",
        (*SIMULATED, "steps=60", "env.name=experiments.unnamed_tasks:Rows1"),
        ("failing-task", "failing-episodes"),
    ),
    Case(
        "alpha",
        "an asynchronous ratio of 16",
        "math_cpu",
        (*LEARNING, "steps=32", "rollout.alpha=16", "env.episodes_per_server=2176"),
        ("old-samples", "off-policy"),
    ),
    Case(
        "redundancy",
        "as many redundant episodes as needed ones, and answers of very different length",
        "simulated",
        (
            *SIMULATED,
            "steps=40",
            "rollout.redundant_episodes=4",
            "rollout.redundant_groups=2",
            "sampling.max_tokens=400",
            "generator.options.length_mean=60",
            "generator.options.length_sigma=1.2",
            "generator.options.decode_base_s=0.004",
        ),
        ("long-episodes-cut",),
    ),
    Case(
        "token-limit",
        "answers are cut after six tokens",
        "math_cpu",
        (*LEARNING, "env.name=experiments.unnamed_tasks:Words2", "sampling.max_tokens=6"),
        ("answers-cut", "truncated", "unreadable"),
    ),
)
CLEAN = (
    Case(
        "clean-simulated",
        "nothing",
        "simulated",
        (*SIMULATED, "env.name=experiments.unnamed_tasks:Rows2", "steps=40"),
        (),
    ),
    Case("clean-learning", "nothing", "math_cpu", (*LEARNING, "env.name=experiments.unnamed_tasks:Words2"), ()),
)
_ORDER = (7, 2, 10, 1, 5, 11, 3, 9, 12, 4, 6, 8)
RUNS = {case.name: f"run-{place:02}" for case, place in zip((*CASES, *CLEAN), _ORDER, strict=True)}
"""Names of the runs' folders, which do not tell."""

"""The recipes as they are, with the alarms' own limits: nothing is wrong, so nothing may be raised.

`steps` are reduced where a whole run takes longer than a few minutes. They still fill every window.
The form of answers needs 128 samples, a type of tasks 16 groups, and what is patient three steps in a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from experiments.pathologies.cases import Case
from rl.config.schema import Config
from rl.observe.alarms import limit

_FEW_GAMES = (  # a model that is made in minutes, not in a quarter of an hour; it wins less
    "env.options.games.train=400",
    "env.options.games.valid_seen=0",
    "env.options.games.valid_unseen=64",
    "model.warm_start.demonstrations=400",
    "model.warm_start.steps=400",
)
_SHORT_WARM_START = ("model.warm_start.demonstrations=2000", "model.warm_start.steps=100")


def _recipe(name: str, recipe: str, *overrides: str) -> Case:
    return Case(name, "nothing", recipe, overrides, ())


RECIPES = (
    _recipe("math", "math_cpu"),
    _recipe("math-seed-1", "math_cpu", "seed=1", "steps=40"),
    _recipe("math-seed-2", "math_cpu", "seed=2", "steps=40", "rollout.alpha=2"),
    _recipe("critic", "math_cpu_critic", "steps=30"),
    _recipe("alfworld", "alfworld_small", "seed=1", "steps=12", "eval.tasks=64", *_FEW_GAMES),
    _recipe("agent-tools", "agent_tools_cpu"),
    _recipe("frozen-lake", "frozen_lake_cpu"),
    _recipe("own-reward", "own_reward_cpu"),
    _recipe("mixture", "mixture_cpu", "steps=16", "eval.tasks=64", *_SHORT_WARM_START),
    _recipe("swe", "swe_cpu", "steps=16"),
    _recipe("simulated", "simulated", "steps=200"),
    _recipe("simulated-seed-1", "simulated", "steps=200", "seed=1"),
    _recipe("simulated-seed-2", "simulated", "steps=200", "seed=2", "rollout.alpha=2"),
    _recipe("simulated-seed-3", "simulated", "steps=200", "seed=3", "rollout.redundant_groups=1"),
    _recipe("math-seed-3", "math_cpu", "seed=3", "steps=40", "rollout.alpha=0.5"),
    _recipe("critic-seed-1", "math_cpu_critic", "seed=1", "steps=30"),
    _recipe("agent-openai", "agent_openai_cpu"),
    _recipe("agent-anthropic", "agent_anthropic_cpu"),
    _recipe("frozen-lake-seed-1", "frozen_lake_cpu", "seed=1"),
    _recipe("own-reward-seed-1", "own_reward_cpu", "seed=1"),
)


def trained(run: Path) -> dict[str, int]:
    """How much the alarms have seen: steps, samples and tokens that were trained."""
    summary = json.loads((run / "summary.json").read_text())
    ledger = summary["ledger"]
    return {"steps": summary["steps"], **{unit: ledger[unit]["trained"] for unit in ("samples", "tokens")}}


def nearest(run: Path, config: Config) -> dict[str, dict[str, float]]:
    """The worst value of the learner's statistics that held as long as an alarm asks for, beside its limit."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss/kl_behavior" in row]
    if not rows:  # of a simulated learner
        return {}

    drift = [row["loss/kl_behavior"] / max(1.0, row["loss/token_staleness"]) ** 2 for row in rows]
    found = {
        "step_kl": ("large-steps", "kl", drift, 1),
        "kl": ("off-policy", "kl", [row["loss/kl_behavior"] for row in rows], 1),
        "ess": ("off-policy", "ess", [row["loss/ess"] for row in rows], -1),
        "entropy": ("entropy", "nats", [row["loss/entropy"] for row in rows], -1),
    }

    nearest_to: dict[str, dict[str, float]] = {}
    for title, (alarm, name, values, sign) in found.items():
        steps = int(limit(config.alarms, alarm, "steps"))
        worst = sign * _held([sign * value for value in values], steps)
        nearest_to[title] = {"worst": worst, "limit": limit(config.alarms, alarm, name)}
    return nearest_to


def _held(values: Sequence[float], steps: int) -> float:
    """The largest value that was reached or passed in so many steps in a row; of fewer steps, the smallest."""
    return max(min(values[start : start + steps]) for start in range(max(1, len(values) - steps + 1)))

"""What an environment server can see of its tasks and its tokenizer before the first episode."""

from __future__ import annotations

from rl.observe.alarms import Alarms
from rollout.episodes.conversation import template_drift
from rollout.episodes.environment import EnvironmentFamily
from rollout.episodes.thinking import Thinking
from rollout.episodes.tokenizer import AgentTokenizer

_LOOKED_AT = 20_000  # training tasks, evenly spread


def check_server(
    family: EnvironmentFamily, tokenizer: AgentTokenizer, thinking: Thinking, eval_tasks: int, alarms: Alarms
) -> None:
    """To be called after the family's start. Raises RunAlarm when held-out tasks are trained."""
    share = overlap(family, eval_tasks)
    found = f"{share:.0%} of {eval_tasks} held-out tasks are training tasks"
    alarms.check("eval-on-train", share > alarms.limit("eval-on-train", "share"), found)

    drift = template_drift(tokenizer, thinking)
    alarms.check("template-drift", bool(drift), drift)


def overlap(family: EnvironmentFamily, eval_tasks: int) -> float:
    """The share of the first held-out tasks that stand among the training tasks as well."""
    count = family.task_count("train")
    trained = {repr(family.task("train", index)) for index in range(0, count, 1 + count // _LOOKED_AT)}
    held_out = [repr(family.task("eval", index)) for index in range(eval_tasks)]
    return sum(task in trained for task in held_out) / max(1, eval_tasks)

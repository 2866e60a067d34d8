"""What an environment server can see of its tokenizer before the first episode."""

from __future__ import annotations

from rl.observe.alarms import Alarms
from rollout.episodes.conversation import template_drift
from rollout.episodes.thinking import Thinking
from rollout.episodes.tokenizer import AgentTokenizer


def check_template(tokenizer: AgentTokenizer, thinking: Thinking, alarms: Alarms) -> None:
    drift = template_drift(tokenizer, thinking)
    alarms.check("template-drift", bool(drift), drift)

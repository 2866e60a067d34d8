"""Which numbers of a row are drawn, and under which names: few, and grouped by what stands before the slash.

`metrics.jsonl` has all of them: the counters of every process, and each diagnostic by the age of its tokens.
"""

from __future__ import annotations

import re

_PROCESS = re.compile(r"^(broker|proxy|learner|generator|env_server|parsers)\.\d+/|^wait/")
_BY_AGE = re.compile(r"^stale_\w+/")
_DRAWN_BY_AGE = ("/kl_behavior", "/ess", "/tokens")
_LEFT_OUT = {
    "train/reward",  # rollout/reward
    "version/timeline",
    "time/over",
    "tokens/trained",
    "loss/kl_behavior_k1",
    "loss/token_staleness",
    "loss/token_staleness_max",
    "loss/ratio_p05",
    "loss/ratio_p50",
    "loss/ratio_p95",
    "broker/hold_s",
    "broker/wait_s",
    "weight_sync/bytes",
    "weight_sync/count",
    "weight_sync/copy_mean_s",
    "weight_sync/wait_mean_s",
    "eval/version_min",
    "eval/version_max",
}
_RENAMED = {
    "tokens_per_second": "speed/tokens_per_second",
    "generator_idle_fraction": "speed/generator_idle",
    "time/step": "speed/step_s",
    "time/wait_batch": "speed/learner_waits_s",
    "time/train": "speed/train_s",
    "time/publish": "speed/publish_s",
    "time/elapsed": "speed/elapsed_s",
}


def charts(values: dict[str, float]) -> dict[str, float]:
    """The numbers that people look at while a run goes on; every name has a group."""
    return {_RENAMED.get(name, name): value for name, value in values.items() if _is_drawn(name)}


def _is_drawn(name: str) -> bool:
    if name in _LEFT_OUT or _PROCESS.match(name) or name.startswith("queue/"):
        return False
    if name.startswith("staleness/"):
        return name in ("staleness/mean", "staleness/max")
    return not _BY_AGE.match(name) or name.endswith(_DRAWN_BY_AGE)

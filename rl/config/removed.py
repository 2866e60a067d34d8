"""Fields that the configuration had, and what to write instead: an old recipe fails in one line that says so."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    "rollout.batch_barrier": "rollout.hooks=[batch_barrier]",
    "rollout.hedge_quantile": "rollout.hooks=[{hedging: {quantile: 0.95}}]",
    "rollout.pin_prompts": "rollout.hooks=[pin_prompts]",
    "rollout.quarantine_failures": "rollout.hooks=[{quarantine: {failures: 5, seconds: 30}}]",
    "rollout.quarantine_s": "rollout.hooks=[{quarantine: {failures: 5, seconds: 30}}]",
    "rollout.surplus": "nothing, since unfinished groups are always kept for the next batch",
    "rollout.turn_barrier": "rollout.hooks=[turn_barrier]",
}
"""By the dotted name of the old field."""

"""Fields of earlier versions: who names one is told in one line what to write instead."""

from __future__ import annotations

REMOVED: dict[str, str] = {
    # ------------------------------------------------------------ limits of alarms
    "alarms.patience": "alarms.limits.ALARM.steps",
    "alarms.log_ratio": "alarms.limits.log-ratio.nats, or .float32_nats where both sides compute in float32",
    "alarms.log_ratio_growth": "alarms.limits.log-ratio-grows.times",
    "alarms.surprise": "alarms.limits.surprise.share",
    "alarms.surprise_z": "alarms.limits.surprise.errors",
    "alarms.ess": "alarms.limits.off-policy.ess",
    "alarms.kl": "alarms.limits.off-policy.kl",
    "alarms.step_kl": "alarms.limits.large-steps.kl",
    "alarms.entropy": "alarms.limits.entropy.nats",
    "alarms.staleness": "alarms.limits.old-samples.versions",
    "alarms.truncated": "alarms.limits.truncated.share",
    "alarms.answers_cut": "alarms.limits.answers-cut.share",
    "alarms.failed": "alarms.limits.failing-episodes.share and alarms.limits.eval-incomplete.share",
    "alarms.unreadable": "alarms.limits.unreadable.share",
    "alarms.invalid_rise": "alarms.limits.invalid-actions.rise",
    "alarms.type_groups": "alarms.limits.task-type-never.groups",
    "alarms.cut_longer": "alarms.limits.long-episodes-cut.times",
    "alarms.slower": "alarms.limits.slow-server.times and alarms.limits.slow-generator.times",
    "alarms.slower_s": "alarms.limits.slow-server.s and alarms.limits.slow-generator.s",
    "alarms.starved": "alarms.limits.learner-starved.share",
    "alarms.starved_s": "alarms.limits.learner-starved.s",
    "alarms.repeated": "alarms.limits.data-repeated.share",
    "alarms.eval_overlap": "alarms.limits.eval-on-train.share",
    "alarms.clock_s": "alarms.limits.clock.s",
    # ------------------------------------------------------------ hooks
    "rollout.batch_barrier": "rollout.hooks=[batch_barrier]",
    "rollout.hedge_quantile": "rollout.hooks=[{hedging: {quantile: 0.95}}]",
    "rollout.pin_prompts": "rollout.hooks=[pin_prompts]",
    "rollout.quarantine_failures": "rollout.hooks=[{quarantine: {failures: 5, seconds: 30}}]",
    "rollout.quarantine_s": "rollout.hooks=[{quarantine: {failures: 5, seconds: 30}}]",
    "rollout.surplus": "nothing, since unfinished groups are always kept for the next batch",
    "rollout.turn_barrier": "rollout.hooks=[turn_barrier]",
    # ------------------------------------------------------------ options of an engine or a kind of learner
    "generator.simulated": "generator.options, with the same names",
    "generator.max_num_batched_tokens": "generator.options.max_num_batched_tokens",
    "generator.kv_block": "generator.options.kv_block",
    "generator.gpu_memory_utilization": "generator.options.gpu_memory_utilization",
    "generator.enforce_eager": "generator.options.enforce_eager",
    "generator.own_process": "generator.options.own_process",
    "learner.simulated_step_s": "learner.options.step_s",
    "learner.simulated_weight_bytes": "learner.options.weight_bytes",
    # ------------------------------------------------------------ constants
    "model.warm_start.warmup_steps": "nothing, it is 20",
    "sampling.top_p": "nothing, training samples from the whole distribution",
    "sampling.top_k": "nothing, training samples from the whole distribution",
    "generator.kv_admission": "nothing, a request reserves its prompt and the mean response",
    "network.base_port": "nothing, ports are free ones",
    "chat.abort_grace_s": "nothing, it is 5 s",
}
"""What to write instead, by the old dotted name. A whole section of before may stand for its fields."""

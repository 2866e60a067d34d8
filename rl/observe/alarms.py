"""Alarms: what a run would otherwise suffer in silence, each by its name, with its likely cause and what to change.

One registry for every process, without torch. A guard stands where its data are and calls `Alarms.check`. An alarm that
stops ends the process with `RunAlarm`, and so the run; any other is told to the supervisor, and the run goes on.
Either is shown once, in terminal, report and wandb; `alarms.jsonl` and `summary.json` also say how often it came again.
docs/silent-faults.md says which fault which alarm finds; limits are the configuration's section `alarms`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from rl.config.alarms import AlarmsConfig
from rl.config.failures import EndsRun


@dataclass(frozen=True)
class Alarm:
    """watches: what must hold. cause: the likeliest. change: the field, or where to look.

    stops: the run ends. patient: only after `alarms.patience` wrong steps in a row.
    """

    watches: str
    cause: str
    change: str
    stops: bool = False
    patient: bool = False


ALARMS = {
    # ------------------------------------------------------------ weights and log-probabilities
    "weights-differ": Alarm(
        "bytes and probe of every load against what the learner published",
        "the engine did not apply the weights that it received",
        "weights.transport, generator.dtype, or weights.probe_tolerance",
        stops=True,
    ),
    "log-ratio": Alarm(
        "log-probabilities of learner and sampler for tokens of the very weights that are trained",
        "another temperature, mask, position, template or attention on one side, or keys and values of old weights",
        "sampling.temperature, generator.on_update=recompute, or alarms.log_ratio where the engine is only imprecise",
    ),
    "not-exact": Alarm(
        "log-probabilities of learner and sampler for every token, each under the weights that sampled it",
        "a token that was not sampled in its place, old keys and values, or a version that is not the token's",
        "generator.on_update=recompute, chat.parser, or alarms.exact where the engine is only imprecise",
        stops=True,
    ),
    "log-ratio-grows": Alarm(
        "the difference of learner and sampler under equal weights stays as it was at first",
        "rounding that adds up: a cast of buffers, weights in another dtype, or a kernel that drifts with the weights",
        "model.dtype, generator.dtype, or alarms.log_ratio_growth",
        patient=True,
    ),
    "surprise": Alarm(
        "sampled tokens are as likely as the entropy of the policy says",
        "the engine samples from a truncated, penalised or greedy distribution",
        "the model's generation_config.json, sampling.temperature, sampling.top_p",
    ),
    "no-diversity": Alarm(
        "members of a group differ",
        "one seed for a whole group, greedy sampling, or a policy that has become deterministic",
        "sampling.temperature, algo.entropy_coef",
        patient=True,
    ),
    "entropy": Alarm(
        "the policy still explores",
        "entropy has collapsed: the learning rate or the clip range is too large",
        "learner.lr, algo.entropy_coef, algo.options.clip_high",
        patient=True,
    ),
    "off-policy": Alarm(
        "the policy still samples much as the one that sampled the batch: effective sample size, KL",
        "the learning rate is too high, or samples are too old",
        "learner.lr, rollout.alpha, rollout.max_staleness, algo.correction",
        patient=True,
    ),
    "large-steps": Alarm(
        "one step of the optimizer changes the policy little",
        "the learning rate is too high",
        "learner.lr, learner.warmup_steps, learner.max_grad_norm",
        patient=True,
    ),
    "old-samples": Alarm(
        "trained samples are at most a few versions old, on average",
        "rollout runs far ahead of training",
        "rollout.alpha, rollout.max_staleness, or alarms.staleness",
        patient=True,
    ),
    # ------------------------------------------------------------ batches
    "stale-batch": Alarm(
        "no trained sample is older than the staleness bound, ceil(rollout.alpha) or rollout.max_staleness",
        "a defect in the broker",
        "report it, with the run's folder",
        stops=True,
    ),
    "batch-contradicts": Alarm(
        "tokens, masks, versions, rows and statistics of a batch agree with each other",
        "tokens are trained that were not sampled, or belong to another sample",
        "the environment's or the engine's own code",
        stops=True,
    ),
    "ranks-differ": Alarm(
        "every rank trains its part of one batch",
        "shards of different batches were delivered",
        "report it, with the run's folder",
        stops=True,
    ),
    "double-start": Alarm(
        "no prompt begins with the same token twice",
        "chat template and tokenizer both add the token of the beginning",
        "the model's chat_template.jinja or tokenizer_config.json",
    ),
    "template-drift": Alarm(
        "the ids of a conversation are what the chat template writes for it",
        "the template writes history in another form than the turn had when it was sampled",
        "the model's chat_template.jinja",
    ),
    "advantage-sign": Alarm(
        "an advantage has the sign of the reward less its group's mean",
        "rewards of other samples, statistics of other groups, or no centring",
        "algo.advantage and its own code",
        stops=True,
    ),
    "loss-tokens": Alarm(
        "the loss is divided by all tokens that it sums",
        "tokens of a part were counted",
        "report it, with the run's folder",
        stops=True,
    ),
    # ------------------------------------------------------------ the optimizer
    "gradient-zero": Alarm(
        "advantages that are not 0 give a gradient",
        "the loss masks or clips every token",
        "algo.correction, algo.options",
    ),
    "weights-still": Alarm(
        "a step moves every tensor of the model",
        "the learning rate is 0, layers are frozen, or the optimizer holds other tensors",
        "learner.lr, learner.schedule, learner.warmup_steps",
    ),
    "optimizer-steps": Alarm(
        "AdamW has counted every step, also those before a resume",
        "its state was lost, or a step was skipped",
        "the checkpoint that resume names",
        stops=True,
    ),
    "gradients-kept": Alarm(
        "a step begins without gradients",
        "those of the step before were not cleared",
        "the optimizer's code",
        stops=True,
    ),
    "reference-moved": Alarm(
        "the reference of the KL penalty stays as it was",
        "it shares tensors with the policy",
        "algo.kl.reference",
        stops=True,
    ),
    # ------------------------------------------------------------ rewards, tasks, evaluation
    "judge-always": Alarm(
        "some answer fails", "the judge passes everything, or the tasks are too easy", "env.options", patient=True
    ),
    "judge-never": Alarm(
        "some answer succeeds",
        "answers miss the form that the judge reads, the judge is dead, or the tasks are too hard",
        "env.options, sampling.max_tokens",
        patient=True,
    ),
    "constant-groups": Alarm(
        "some group has members of different reward",
        "tasks are all too easy or all too hard, or rewards depend on the task only",
        "rollout.group_size, rollout.curriculum, env.options",
        patient=True,
    ),
    "truncated": Alarm(
        "episodes end by themselves",
        "the limit of tokens or turns is too low",
        "sampling.max_tokens, env.max_turns, generator.max_model_len",
        patient=True,
    ),
    "answers-cut": Alarm(
        "few answers are cut by the limit of tokens",
        "the limit is too low for this model or these tasks: what is right but long is never rewarded",
        "sampling.max_tokens, generator.max_model_len, algo.mask_truncated",
        patient=True,
    ),
    "unreadable": Alarm(
        "the environment can use most answers",
        "answers lack the box, tag or call that is asked for: another chat template, or too few tokens for it",
        "sampling.max_tokens, the model's chat_template.jinja, the instruction in env.options",
        patient=True,
    ),
    "invalid-actions": Alarm(
        "answers that the environment cannot use do not become more",
        "the policy forgets the form of an answer: the learning rate is too high, or wrong forms are rewarded",
        "learner.lr, rewards for invalid actions in env.options, algo.kl.coef",
    ),
    "task-type-never": Alarm(
        "every type of task succeeds now and then, if any does",
        "the judge or the tasks of this type are broken, or they are too hard for the model",
        "the tasks in env.options, or rollout.curriculum=success",
    ),
    "long-episodes-cut": Alarm(
        "episodes that redundancy cuts are no longer than those that are trained",
        "the first to finish win, so long answers are hardly ever trained",
        "rollout.redundant_episodes, rollout.redundant_groups",
    ),
    "failing-task": Alarm(
        "a task that was begun comes to an end in one of its attempts",
        "this task hangs or crashes its environment, or needs more time than the deadline allows",
        "the task itself, env.step_deadline_s, rollout.episode_deadline_s",
    ),
    "failing-episodes": Alarm(
        "episodes come to an end",
        "environments or judges fail or run past their deadline",
        "env.step_deadline_s, the logs of the environment servers",
        patient=True,
    ),
    "data-repeated": Alarm(
        "a batch has other tasks than the last ones",
        "the order of the data began anew, or does not advance",
        "resume, rollout.curriculum",
    ),
    "eval-on-train": Alarm(
        "held-out tasks are not trained",
        "both splits hold the same tasks",
        "env.options, or alarms.eval_overlap",
        stops=True,
    ),
    "eval-incomplete": Alarm(
        "held-out tasks are answered",
        "their episodes fail or run past their deadline, or are refused: answered by older weights, say",
        "env.step_deadline_s, the logs of broker and environment servers",
    ),
    # ------------------------------------------------------------ processes and time
    "slow-server": Alarm(
        "environment servers take about equally long for a turn",
        "its machine is overloaded, or what it talks to is slow",
        "that server's log, rollout.hooks=[quarantine, hedging]",
    ),
    "slow-generator": Alarm(
        "generators take about equally long for a token",
        "its device is shared or throttled, or requests are not balanced",
        "that generator's log and device, generator.max_num_seqs, pin_prompts in rollout.hooks",
    ),
    "learner-starved": Alarm(
        "a learner with a device of its own does not wait for batches nearly all the time",
        "generation or environments are too slow for it",
        "generator.count and learner.ranks (fresco plan --run), rollout.alpha, env.servers",
        patient=True,
    ),
    "process-died": Alarm(
        "no process of the run dies",
        "memory ran out, somebody killed it, or it hung",
        "its log, generator.kv_cache_bytes, timeouts.hang_s",
    ),
    "clock": Alarm(
        "wall clock and monotonic clock advance together",
        "the clock was set, or the machine was suspended",
        "the machine's time service",
    ),
}


class RunAlarm(EndsRun, RuntimeError):
    """An alarm that stops the run."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(line(name, detail))
        self.name = name
        self.detail = detail


def line(name: str, detail: str) -> str:
    """What a user reads: the alarm, what was found, the likely cause, what to change."""
    alarm = ALARMS[name]
    return f"alarm {name}: {detail}; likely cause: {alarm.cause}; look at: {alarm.change}"


class Alarms:
    """Those of one process; `tell(name, detail)` hears of each that does not stop, each time."""

    def __init__(self, limits: AlarmsConfig, tell: Callable[[str, str], None]) -> None:
        self.limits = limits
        self._tell = tell
        self._in_a_row: Counter[str] = Counter()

    def check(self, name: str, wrong: bool, detail: str) -> None:
        """Once per step for a patient alarm. Raises RunAlarm if this is one that stops."""
        alarm = ALARMS[name]
        self._in_a_row[name] = self._in_a_row[name] + 1 if wrong else 0
        if not wrong or (alarm.patient and self._in_a_row[name] < self.limits.patience):
            return

        if alarm.stops:
            raise RunAlarm(name, detail)
        self._tell(name, detail)


class Clock:
    """How far the wall clock has jumped against the monotonic one since it was last read; both in seconds."""

    def __init__(self, wall_s: float, monotonic_s: float) -> None:
        self._offset_s = wall_s - monotonic_s

    def jump_s(self, wall_s: float, monotonic_s: float) -> float:
        jump_s = wall_s - monotonic_s - self._offset_s
        self._offset_s += jump_s
        return abs(jump_s)

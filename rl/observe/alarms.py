"""Alarms: what a run would otherwise suffer in silence, each by its name, with its likely cause and what to change.

One registry for every process, without torch. A guard stands where its data are and calls `Alarms.check`. An alarm that
stops ends the process with `RunAlarm`, and so the run; any other is told to the supervisor, and the run goes on.
Either is shown once, in terminal, report and wandb; `alarms.jsonl` and `summary.json` also say how often it came again.
docs/silent-faults.md says which fault which alarm finds. Limits stand here, where a preflight without torch can check
what `alarms.limits` says of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from rl.config.alarms import AlarmsConfig
from rl.config.damage import readable
from rl.config.failures import EndsRun
from rl.config.section import LARGEST
from rl.config.tree import ConfigError, nearest

_NAME = "alarms.jsonl"
"""In the folder of a run: every alarm when it is raised, also of a run that goes on or was killed."""


@dataclass(frozen=True)
class Limit:
    """What a guard compares with; least and most: between which another value may lie."""

    value: float
    meaning: str
    least: float = 0.0
    most: float = LARGEST


@dataclass(frozen=True)
class Alarm:
    """watches: what must hold. cause: the likeliest. change: the field, or where to look.

    stops: the run ends. patient: only after so many wrong steps in a row as its limit `steps` says.
    """

    watches: str
    cause: str
    change: str
    stops: bool = False
    patient: bool = False
    own_limits: Mapping[str, Limit] = field(default_factory=dict)

    @property
    def limits(self) -> Mapping[str, Limit]:
        """The limits by name, as `alarms.limits` names them."""
        return {**self.own_limits, **(_PATIENCE if self.patient else {})}


_PATIENCE = {"steps": Limit(3, "Wrong steps in a row before the alarm is raised.", least=1)}
_FAILED = {"share": Limit(0.3, "Largest share of attempts or tasks that fail.", most=1)}
_SLOWER = {
    "times": Limit(3, "How many times the others' median its fastest quarter of turns may take.", least=1),
    "s": Limit(0.2, "Seconds that a turn must take more than theirs as well."),
}


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
        "sampling.temperature, generator.on_update=recompute, or alarms.limits.log-ratio for an imprecise engine",
        own_limits={
            "nats": Limit(0.15, "Largest root mean square difference, in nats."),
            "float32_nats": Limit(
                3e-3, "The same, where both compute in float32 and updates recompute running requests."
            ),
        },
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
        "model.dtype, generator.dtype, or alarms.limits.log-ratio-grows",
        patient=True,
        own_limits={
            "times": Limit(
                10, "How many times its first size it may reach, once above a tenth of log-ratio's.", least=1
            )
        },
    ),
    "surprise": Alarm(
        "sampled tokens are as likely as the entropy of the policy says",
        "the engine samples from a truncated, penalised or greedy distribution",
        "the model's generation_config.json, sampling.temperature",
        own_limits={
            "share": Limit(0.05, "Largest |mean of -log p - entropy| of sampled tokens, as a share of the entropy."),
            "errors": Limit(6, "How many of its standard errors it must be as well."),
        },
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
        own_limits={"nats": Limit(1e-3, "Least mean entropy on sampled tokens, in nats.")},
    ),
    "off-policy": Alarm(
        "the policy still samples much as the one that sampled the batch: effective sample size, KL",
        "the learning rate is too high, or samples are too old",
        "learner.lr, rollout.alpha, rollout.max_staleness, algo.correction",
        patient=True,
        own_limits={
            "ess": Limit(
                0.2, "Least effective sample size of the importance ratios, as a share of the tokens.", most=1
            ),
            "kl": Limit(1, "Largest mean KL (k3) to the policies that sampled a batch, in nats a token."),
        },
    ),
    "large-steps": Alarm(
        "one step of the optimizer changes the policy little",
        "the learning rate is too high",
        "learner.lr, learner.warmup_steps, learner.max_grad_norm",
        patient=True,
        own_limits={
            "kl": Limit(5e-3, "Largest such KL to the version before; to older ones, times the square of their age.")
        },
    ),
    "old-samples": Alarm(
        "trained samples are at most a few versions old, on average",
        "rollout runs far ahead of training",
        "rollout.alpha, rollout.max_staleness, or alarms.limits.old-samples",
        patient=True,
        own_limits={"versions": Limit(8, "Largest mean staleness of a batch.")},
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
        "batch parts of different batches were delivered",
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
    "ids-without-text": Alarm(
        "sampled ids are tokens of the tokenizer",
        "the model's vocabulary is padded beyond its tokenizer's, and its logits there were never trained",
        "the model's vocab_size and tokenizer.json; the environment servers' logs name the ids",
        own_limits={"share": Limit(0.001, "Largest share of a batch's sampled tokens that stand for no text.", most=1)},
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
        own_limits={
            "share": Limit(0.9, "Largest share of a batch's episodes that a limit of length or turns cut.", most=1)
        },
    ),
    "answers-cut": Alarm(
        "few answers are cut by the limit of tokens",
        "the limit is too low for this model or these tasks: what is right but long is never rewarded",
        "sampling.max_tokens, generator.max_model_len, algo.mask_truncated",
        patient=True,
        own_limits={"share": Limit(0.2, "Largest share of a batch's answers that the limit of tokens cut.", most=1)},
    ),
    "unreadable": Alarm(
        "the environment can use most answers",
        "answers lack the box, tag or call that is asked for: another chat template, or too few tokens for it",
        "sampling.max_tokens, the model's chat_template.jinja, the instruction in env.options",
        patient=True,
        own_limits={"share": Limit(0.9, "Largest share of answers that the environment cannot use.", most=1)},
    ),
    "invalid-actions": Alarm(
        "answers that the environment cannot use do not become more",
        "the policy forgets the form of an answer: the learning rate is too high, or wrong forms are rewarded",
        "learner.lr, rewards for invalid actions in env.options, algo.kl.coef",
        own_limits={"rise": Limit(0.25, "Largest rise of that share since the first batches.", most=1)},
    ),
    "task-type-never": Alarm(
        "every type of task succeeds now and then, if any does",
        "the judge or the tasks of this type are broken, or they are too hard for the model",
        "the tasks in env.options, or rollout.curriculum=success",
        own_limits={"groups": Limit(16, "Failed groups of 8 samples before a type counts as never solved.", least=1)},
    ),
    "long-episodes-cut": Alarm(
        "episodes that redundancy cuts are no longer than those that are trained",
        "the first to finish win, so long answers are hardly ever trained",
        "rollout.redundant_episodes, rollout.redundant_groups",
        own_limits={"times": Limit(1.5, "How many times as long as trained episodes the cut ones may be.")},
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
        own_limits=_FAILED,
    ),
    "data-repeated": Alarm(
        "a batch has other tasks than the last ones",
        "the order of the data began anew, or does not advance",
        "resume, rollout.curriculum",
        own_limits={"share": Limit(0.9, "Largest share of a batch's tasks that the last batches had as well.", most=1)},
    ),
    "eval-on-train": Alarm(
        "held-out tasks are not trained",
        "both splits hold the same tasks",
        "env.options, or alarms.limits.eval-on-train",
        stops=True,
        own_limits={"share": Limit(0.1, "Largest share of held-out tasks that are training tasks.", most=1)},
    ),
    "eval-incomplete": Alarm(
        "held-out tasks are answered",
        "their episodes fail or run past their deadline, or are refused: answered by older weights, say",
        "env.step_deadline_s, the logs of broker and environment servers",
        own_limits=_FAILED,
    ),
    # ------------------------------------------------------------ processes and time
    "slow-server": Alarm(
        "environment servers take about equally long for a turn",
        "its machine is overloaded, or what it talks to is slow",
        "that server's log, rollout.hooks=[quarantine, hedging]",
        own_limits=_SLOWER,
    ),
    "slow-generator": Alarm(
        "generators take about equally long for a token",
        "its device is shared or throttled, or requests are not balanced",
        "that generator's log and device, generator.max_num_seqs, pin_prompts in rollout.hooks",
        own_limits=_SLOWER,
    ),
    "learner-starved": Alarm(
        "a learner with a device of its own does not wait for batches nearly all the time",
        "generation or environments are too slow for it",
        "generator.count and learner.ranks (fresco plan --run), rollout.alpha, env.servers",
        patient=True,
        own_limits={
            "share": Limit(0.9, "Largest share of a step that the learner waits for its batch.", most=1),
            "s": Limit(1, "Shortest such wait that counts."),
        },
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
        own_limits={"s": Limit(5, "Largest jump of the wall clock against the monotonic one.")},
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


def limit(config: AlarmsConfig, alarm: str, name: str) -> float:
    """What the configuration says of this limit, or the alarm's own value."""
    return config.limits.get(alarm, {}).get(name, ALARMS[alarm].limits[name].value)


def check_alarms(config: AlarmsConfig) -> None:
    """Raises ConfigError for an alarm or a limit that is not there, or a value that a limit cannot have."""
    for alarm in config.off:
        known = _known("alarms.off", alarm)
        if known.stops:
            others = "".join(f"; raise alarms.limits.{alarm}.{name}" for name in known.limits)
            raise ConfigError(f"alarms.off={alarm!r}: it ends the run, so it cannot be switched off{others}")

    for alarm, values in config.limits.items():
        limits = _known("alarms.limits", alarm).limits
        for name, value in values.items():
            field = f"alarms.limits.{alarm}.{name}"
            if name not in limits:
                raise ConfigError(f"unknown limit {field!r}{nearest(name, list(limits))}")
            least, most = limits[name].least, limits[name].most
            if not least <= value <= most:
                raise ConfigError(f"{field}={value:g}: it must lie between {least:g} and {most:g}")


def _known(field: str, alarm: str) -> Alarm:
    if alarm not in ALARMS:
        raise ConfigError(f"{field}: there is no alarm {alarm!r}{nearest(alarm, list(ALARMS))}")
    return ALARMS[alarm]


class Alarms:
    """The alarms of one process; `tell(name, detail)` hears of each that does not stop, each time."""

    def __init__(self, config: AlarmsConfig, tell: Callable[[str, str], None]) -> None:
        self._config = config
        self._tell = tell
        self._in_a_row: Counter[str] = Counter()

    def limit(self, alarm: str, name: str) -> float:
        return limit(self._config, alarm, name)

    def check(self, name: str, wrong: bool, detail: str) -> None:
        """To be called once per step for a patient alarm. Raises RunAlarm if this is one that stops."""
        alarm = ALARMS[name]
        self._in_a_row[name] = self._in_a_row[name] + 1 if wrong else 0
        if not wrong or (alarm.patient and self._in_a_row[name] < self.limit(name, "steps")):
            return

        if alarm.stops:
            raise RunAlarm(name, detail)
        if name not in self._config.off:
            self._tell(name, detail)


class Clock:
    """How far the wall clock has jumped against the monotonic one since it was last read; both in seconds."""

    def __init__(self, wall_s: float, monotonic_s: float) -> None:
        self._offset_s = wall_s - monotonic_s

    def jump_s(self, wall_s: float, monotonic_s: float) -> float:
        jump_s = wall_s - monotonic_s - self._offset_s
        self._offset_s += jump_s
        return abs(jump_s)


class RaisedAlarm(msgspec.Struct, tag="raised"):
    """The first time. `step`: how many were trained by then; `who`: the process that saw it.

    `last_step` and `count`: of all times that this process raised it, as far as they are known.
    """

    time: float
    step: int
    name: str
    who: str
    detail: str
    cause: str
    change: str
    last_step: int
    count: int = 1

    @classmethod
    def of(cls, name: str, step: int, who: str, detail: str) -> RaisedAlarm:
        alarm = ALARMS[name]
        return cls(time.time(), step, name, who, detail, alarm.cause, alarm.change, step)

    def again(self, step: int) -> RaisedAgain:
        """Note that it was raised once more, by the same process."""
        self.last_step = step
        self.count += 1
        return RaisedAgain(self.name, step)

    @property
    def when(self) -> str:
        """When it was raised, for people."""
        again = f", {self.count} times up to step {self.last_step}" if self.count > 1 else ""
        return f"after step {self.step}{again}"


class RaisedAgain(msgspec.Struct, tag="again"):
    """A short line for each further time."""

    name: str
    step: int


def keep_alarm(run: Path, alarm: RaisedAlarm | RaisedAgain) -> None:
    """Raises OSError where the disk is full."""
    with (run / _NAME).open("ab") as file:
        file.write(msgspec.json.encode(alarm) + b"\n")


_Line: Any = RaisedAlarm | RaisedAgain


def read_alarms(run: Path) -> list[RaisedAlarm]:
    """One alarm for each name, in the order in which they were raised; a line that was being written is left out."""
    path = run / _NAME
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    raised: dict[str, RaisedAlarm] = {}
    for alarm in readable(lines, _Line):
        if isinstance(alarm, RaisedAlarm):
            raised[alarm.name] = alarm
        elif alarm.name in raised:
            raised[alarm.name].again(alarm.step)
    return list(raised.values())

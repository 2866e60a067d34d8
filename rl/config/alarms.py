"""The configuration's section `alarms`: the limits of `rl/observe/alarms.py`, all in one place."""

from __future__ import annotations

from pydantic import Field

from rl.config.section import Section


class AlarmsConfig(Section):
    patience: int = Field(3, ge=1)
    """Steps in a row that must be wrong before an alarm on a statistic is raised."""
    log_ratio: float | None = Field(None, gt=0)
    """Largest root mean square difference of log-probabilities between learner and sampler under equal weights, in
    nats; None: 3e-3 if both compute in float32 and updates recompute running requests, else 0.15."""
    log_ratio_growth: float = Field(10.0, gt=1)
    """How many times what it was in the first steps that difference may become, once it is a tenth of `log_ratio`."""
    exact: float | None = Field(None, gt=0)
    """Largest difference, in nats, between the log-probability that a token was sampled with and the learner's under
    the very weights that sampled it, over every token of every batch; beyond it the run ends. None: not compared. It
    costs a copy of the weights and a forward for each version in a batch. 1e-4 suits float32 on both sides."""
    surprise: float = Field(0.05, gt=0)
    """Largest |mean of -log p - entropy| of sampled tokens under equal weights, as a share of the entropy; looked at in
    batches where these are at least half of all tokens, such as the first ones of a run."""
    surprise_z: float = Field(6.0, gt=0)
    """How many of its standard errors it must be as well."""
    ess: float = Field(0.2, ge=0, le=1)
    """Least effective sample size of a batch's importance ratios, as a share of its tokens."""
    kl: float = Field(1.0, gt=0)
    """Largest mean KL (k3) of the learner to the policies that sampled a batch, in nats a token."""
    step_kl: float = Field(5e-3, gt=0)
    """Largest such KL for samples of the version before, in nats a token. Older ones may have as much times the square
    of their age, as of steps in one direction."""
    entropy: float = Field(1e-3, ge=0)
    """Least mean entropy of the policy on sampled tokens, in nats."""
    staleness: float = Field(8.0, gt=0)
    """Largest mean staleness of a batch, in versions."""
    truncated: float = Field(0.9, ge=0, le=1)
    """Largest share of episodes of a batch that a limit of length or turns cut."""
    answers_cut: float = Field(0.2, ge=0, le=1)
    """Largest share of the answers of a batch that the limit of tokens cut."""
    failed: float = Field(0.3, ge=0, le=1)
    """Largest share of failed attempts among those that ended between two batches, and of an evaluation's tasks."""
    unreadable: float = Field(0.9, ge=0, le=1)
    """Largest share of answers that the environment cannot use (`invalid_share` of its info)."""
    invalid_rise: float = Field(0.25, ge=0, le=1)
    """Largest rise of that share since the first batches."""
    type_groups: int = Field(16, ge=1)
    """Groups of one task type, with 8 samples each or as many more, that may fail before it counts as never solved."""
    cut_longer: float = Field(1.5, gt=0)
    """How many times as long as trained episodes those may be, in tokens or turns, that redundancy has cut."""
    slower: float = Field(3.0, gt=1)
    """How many times the median of the others a server may take for a turn, or a generator for a token, in the fastest
    quarter of its turns."""
    slower_s: float = Field(0.2, ge=0)
    """How many seconds a turn of it must take more than theirs as well."""
    starved: float = Field(0.9, ge=0, le=1)
    """Largest share of a step that the learner waits for its batch, on a device of its own: not on CPUs."""
    starved_s: float = Field(1.0, ge=0)
    """Shortest such wait that counts."""
    repeated: float = Field(0.9, ge=0, le=1)
    """Largest share of a batch's tasks that the last batches had as well (a quarter of the data at most)."""
    eval_overlap: float = Field(0.1, ge=0, le=1)
    """Largest share of held-out tasks that stand among the training tasks as well."""
    clock_s: float = Field(5.0, gt=0)
    """Largest jump of the wall clock against the monotonic one."""

"""Steps of a recorded run, trained again by the trainer of a run, without engines, broker or sockets.

    for row in replayed(recorded, Request(first=40, last=50)):                    # the same steps: bit for bit, or not
    for row in replayed(recorded, Request(40, 50, {"topr": changed_config})):     # and what another loss would do

What was sampled stays as it was. So a changed run is a counterfactual only as long as its policy is near the recorded
one, and each row says how near. `trust/ess` is the effective sample size of the batch under the changed policy, as a
share of its samples; `trust/kl` is in nats for each token. Both compare with the very weights that the run had at that
step, which are computed again beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from algos.advantages import group_centred
from rl.config.plugins import own_place
from rl.config.schema import Config, ConfigError
from rl.config.tree import differing
from rl.learner import checkpoint
from rl.learner.algorithm import make_algorithm
from rl.learner.changes import settle
from rl.learner.credit import all_reduce, rewarded_rows
from rl.learner.guards import ExactCheck
from rl.learner.tensor_digests import tensor_digests
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats
from rl.models.team import make_mesh, make_team
from rl.observe.alarms import Alarms
from rl.replay.lab import FirstStep, cosine, first_step
from rl.replay.ranks import on_ranks
from rl.replay.recorded import Recorded
from rl.replay.watch import Watch
from rl.store.checkpoint_folder import CheckpointError, Meta
from rl.wire.messages import BatchPart

RECORDED = "recorded"
Gradients = dict[str, Tensor]
Tokens = Mapping[int, Tensor]
_MOST = 30.0  # nats of a whole sample: beyond that one sample is all there is


@dataclass(frozen=True)
class Request:
    """What to train again: the steps from `first` on, without `last`."""

    first: int
    last: int
    variants: Mapping[str, Config] = field(default_factory=dict)
    """Changed configurations by name; none: the run as it was."""
    computed: Config | None = None
    """The run as it was, computed in another way, such as by another number of ranks."""
    trust: tuple[float, float] = (0.0, math.inf)
    """The least effective sample size, and the largest KL in nats a token."""
    trail: bool = False
    """Whether every step tells digests of what it computed."""
    exact: bool = False
    """Whether every token is compared with the very weights that sampled it, as `alarms.exact` does in a run."""


@dataclass
class Row:
    """What came of one step. Of version `first` there is one without any step."""

    variant: str
    n: int
    """The version that it made."""
    values: dict[str, float] = field(default_factory=dict)
    compared: int = 0
    """How many metrics the run has recorded of this step."""
    differing: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """The metrics that differ from the run's own row, and what stands there; None for what is not finite."""
    tensors: list[str] | None = None
    """The tensors that differ from those of the run; None where it has no digests of them."""
    trail: dict[str, str] = field(default_factory=dict)
    """Digests of what the step computed, in that order."""
    first: FirstStep | None = None
    cpu_s: float = 0.0
    beyond: bool = False
    """Whether it is too far from the run to be trusted."""

    @property
    def identical(self) -> bool:
        return not self.differing and not self.tensors


class Replay:
    """One rank's trainer."""

    def __init__(
        self, recorded: Recorded, config: Config, saved: Path | None, rank: int, ranks: int, device: str, exact: bool
    ) -> None:
        """saved: a checkpoint; None: the start model. exact: whether each step tells `exact/max` and its like, whatever
        they are. Raises CheckpointError, ValueError."""
        folder = recorded.run.model_folder
        if folder is None or not folder.exists():
            raise ValueError(f"{folder}, which the run began with, is not there any more; make it again there")
        self._recorded = recorded
        together = config.learner.context_parallel if ranks % config.learner.context_parallel == 0 else 1
        self._share = rank // together, ranks // together

        never = config.alarms.model_copy(update={"exact": math.inf if exact else None})
        config = config.model_copy(deep=True, update={"alarms": never})  # what was set in the run is set in it again
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(config.seed)

        last_step = max(recorded.run.start_step, config.steps)
        mesh = make_mesh(config, device, ranks)
        team = make_team(device, together)
        self.trainer = Trainer(config, folder, last_step=last_step, mesh=mesh, team=team, device=device)
        self.watch = Watch(self.trainer)
        self._began = config.learner.model_copy()
        silent = Alarms(never, lambda name, detail: None)
        self._exact = ExactCheck(self.trainer.policy, config, silent, self.trainer.counted)
        if saved is not None:
            checkpoint.load(saved, self.trainer.trained())

    def again(self, variant: str, step: int, trail: bool, gradients: Gradients | None, known: Tokens | None) -> Row:
        """What `rl.learner.process.train` does with the batch of a step.

        gradients: those of other variants for this step, to which this one is compared and added. known: the
        log-probabilities under the run's own policy; None: this is the run.
        """
        begin = time.process_time()
        part = self._recorded.part(step, *self._share)
        self.watch.begin(deep=trail or gradients is not None)
        settle(self.trainer.config.learner, self._began, self._recorded.sets(step, self._began))
        minibatches = self.trainer.minibatches(part)
        exact = self._exact.batch(step, minibatches)

        stats = UpdateStats()
        for minibatch in minibatches:
            stats.add(self.trainer.update(minibatch, step, part.over))
        stats.all_reduce()
        row = Row(variant, step + 1, stats.metrics() | exact)
        row.values["train/loss"] = row.values.get("loss/objective", 0.0)

        if known is not None:
            row.values |= nearness(self.watch.tokens, known, part, self.trainer.counted)
        else:
            self.compared(row)
        if trail:
            row.trail = self.watch.trail() | row.trail
        if gradients is not None:
            row.first = first_step(self.watch, part)
            own = gradients[variant] = self.watch.vector()
            row.first.cosine = {name: cosine(own, other) for name, other in gradients.items()}
        row.cpu_s = float(all_reduce(torch.tensor(time.process_time() - begin, dtype=torch.float64), "sum"))
        return row

    def compared(self, row: Row) -> Row:
        """The row with what the run recorded of this version."""
        told = {name: each for name, each in self._recorded.metrics.get(row.n, {}).items() if name in row.values}
        values = {name: row.values[name] if math.isfinite(row.values[name]) else None for name in told}  # as in JSON
        row.compared = len(told)
        row.differing = differing(values, told)

        digests = tensor_digests(self.trainer.weights.trainable())
        if (kept := self._recorded.digests.get(row.n)) is not None:
            row.tensors = [name for name, digest in digests.items() if kept.get(name) != digest]
        row.trail = {f"{name} after the step": digest for name, digest in digests.items()}
        return row


def replayed(recorded: Recorded, request: Request) -> Iterator[Row]:
    """The rows of the run as it was, then those of each variant. Once one is beyond trust, all its rows are.

    Raises ConfigError where the run cannot be replayed; what a loss of the user's own raises.
    """
    for each in request.variants.values():
        make_algorithm(each)  # a wrong name is told before anything is computed
    config = request.computed or next(iter(request.variants.values()), recorded.config)
    device = "cuda" if recorded.run.learner_device == "cuda" and torch.cuda.is_available() else "cpu"
    ranks = config.learner.ranks if device == "cpu" else min(config.learner.ranks, torch.cuda.device_count())

    ess, kl = request.trust
    left = set()
    try:
        for row in on_ranks(Row, ranks, device, partial(_rows, recorded.folder, request, ranks, device)):
            if row.values.get("trust/ess", 1.0) < ess or row.values.get("trust/kl", 0.0) > kl:
                left.add(row.variant)
            row.beyond = row.variant in left
            yield row
    except (CheckpointError, ValueError) as error:
        if own_place(error):
            raise
        raise ConfigError(f"{str(recorded.folder)!r}: {' '.join(str(error).split())}") from None


def _rows(run: Path, request: Request, ranks: int, device: str, rank: int, folder: Path) -> Iterator[Row]:
    """Of one rank; all go through them together. Each reads the run, and so registers what it has registered."""
    recorded = Recorded(run)
    make = partial(Replay, recorded, rank=rank, ranks=ranks, device=device, exact=request.exact)
    state, at = recorded.state_before(request.first)
    base = make(config=request.computed or recorded.config, saved=state)
    yield base.compared(Row(RECORDED, at))

    known: dict[int, Tokens] = {}
    gradients: Gradients = {}
    for step in range(at, request.last):
        parts = bool(request.variants) and step == request.first
        if parts and step != at:
            checkpoint.save(folder, base.trainer.trained(), Meta(step, timeline=0, ranks=ranks), b"", keep=1)
            state = folder / f"step-{step}"
        yield base.again(RECORDED, step, request.trail, gradients if parts else None, known=None)
        if request.variants and step >= request.first:
            known[step] = {member: table["log-probabilities"].float() for member, table in base.watch.tokens.items()}

    del base
    for name, config in request.variants.items():
        other = make(config=config, saved=state)
        for step in range(request.first, request.last):
            first = gradients if step == request.first else None
            try:
                yield other.again(name, step, trail=False, gradients=first, known=known[step])
            except FloatingPointError as error:
                raise ValueError(f"{name}: {error}; leave it out, or end before that step with --to") from None


def nearness(
    own: Mapping[int, Mapping[str, Tensor]], known: Tokens, part: BatchPart, among: dist.ProcessGroup | None = None
) -> dict[str, float]:
    """How near a policy is to that of the run, by the tokens of one batch, over all ranks.

    among: ranks that have each sample once between them; None: all.

    Beside the two measures of trust stands `gain`: what the changed policy would have earned more than the run's on
    these tasks. Each sample counts by how much likelier it has become. `gain/error` is its standard error.
    """
    found = torch.zeros(len(part.rows), 3, dtype=torch.float64)  # of each sample: tokens, KL, log of its weight
    for member, table in own.items():
        before = known.get(member)
        logp = table["log-probabilities"]
        if before is not None and len(before) == len(logp) > 0:
            ratio = logp - before.double()
            kl = (ratio.clamp(-_MOST, _MOST).expm1() - ratio).sum()
            found[member] = torch.stack([torch.tensor(len(logp)), kl, ratio.sum()])

    found = all_reduce(found, "sum", among)
    there = found[:, 0] > 0
    if not there.any():
        return {}

    tokens, kl, ratio = found[there].T
    weight = ratio.clamp(-_MOST, _MOST).exp()
    over = torch.zeros(len(part.rows), dtype=torch.float64)  # of each sample: its reward, less the mean of its group
    rewarded = rewarded_rows(part)
    rewards = over.new_tensor([row.reward for row in part.rows])
    group = torch.tensor([row.group_id for row in part.rows])
    over[rewarded] = group_centred(rewards[rewarded], group[rewarded]).double()
    over = over[there]

    gain = (weight * over).sum() / weight.sum()
    return {
        "trust/ess": float(weight.sum() ** 2 / (weight**2).sum() / len(weight)),
        "trust/kl": float(kl.sum() / tokens.sum()),
        "gain": float(gain),
        "gain/error": float((weight * (over - gain)).norm() / weight.sum()),
    }

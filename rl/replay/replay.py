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

import torch
import torch.distributed as dist
from torch import Tensor

from algos.advantages import group_centred
from rl.config.schema import Config
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
from rl.store.checkpoint_folder import Meta
from rl.wire.messages import BatchPart

RECORDED = "recorded"
Gradients = dict[str, Tensor]
Table = Mapping[str, Tensor]
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
    differing: dict[str, tuple[float, float | None]] = field(default_factory=dict)
    """The metrics that differ from the run's own row, and what stands there."""
    tensors: list[str] | None = None
    """The tensors that differ from those of the run; None where it has no digests of them."""
    digests: dict[str, str] = field(default_factory=dict)
    trail: dict[str, str] = field(default_factory=dict)
    """Digests of what the step computed, in that order."""
    first: FirstStep | None = None
    cpu_s: float = 0.0

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
        run = recorded.run
        if run.model_folder is None or not run.model_folder.exists():
            raise ValueError(
                f"{run.model_folder}, which the run began with, is not there any more; make it again there"
            )
        self._recorded = recorded
        self._rank = rank
        self._ranks = ranks
        self._together = config.learner.context_parallel if ranks % config.learner.context_parallel == 0 else 1

        config = config.model_copy(deep=True)  # what was set in the run is set in it again
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(config.seed)

        self.trainer = Trainer(
            config,
            run.model_folder,
            last_step=max(run.start_step, config.steps),
            mesh=make_mesh(config, device, ranks),
            team=make_team(device, self._together),
            device=device,
        )
        self.watch = Watch(self.trainer)
        self._began = config.learner.model_copy()

        never = config.alarms.model_copy(update={"exact": math.inf if exact else None})
        told = config.model_copy(update={"alarms": never})
        alarms = Alarms(never, lambda name, detail: None)
        self._exact = ExactCheck(self.trainer.policy, told, alarms, self.trainer.counted)
        if saved is not None:
            checkpoint.load(saved, self.trainer.trained())

    def save(self, folder: Path, step: int) -> Path:
        checkpoint.save(folder, self.trainer.trained(), Meta(step, self._recorded.run.timeline, self._ranks), b"", 1)
        return folder / f"step-{step}"

    def again(self, variant: str, step: int, trail: bool, gradients: Gradients | None, known: Tokens | None) -> Row:
        """What `rl.learner.process.train` does with the batch of a step.

        gradients: those of other variants for this step, to which this one is compared and added. known: the
        log-probabilities under the run's own policy.
        """
        begin = time.process_time()
        part = self._recorded.part(step, self._rank // self._together, self._ranks // self._together)
        self.watch.begin(deep=trail or gradients is not None)
        settle(self.trainer.config.learner, self._began, self._recorded.sets(step, self._began))
        minibatches = self.trainer.minibatches(part)
        compared = self._exact.batch(step, minibatches)

        stats = UpdateStats()
        for minibatch in minibatches:
            stats.add(self.trainer.update(minibatch, step, part.over))
        stats.all_reduce()
        values = stats.metrics() | compared
        values["train/loss"] = values.get("loss/objective", 0.0)
        if known is not None:
            values |= nearness(self.watch.tokens, known, part, self.trainer.counted)

        row = self.row(variant, step + 1, values, begin)
        if trail:
            row.trail = self.watch.trail() | {f"{name} after the step": each for name, each in row.digests.items()}
        if gradients is not None:
            row.first = first_step(self.watch, part)
            own = gradients[variant] = self.watch.vector()
            row.first.cosine = {name: cosine(own, other) for name, other in gradients.items()}
        return row

    def row(self, variant: str, n: int, values: dict[str, float], begin: float) -> Row:
        found = Row(variant, n, values)
        if variant == RECORDED:
            found.digests = tensor_digests(self.trainer.weights.trainable())
            found.compared = len(values.keys() & self._recorded.metrics.get(n, {}).keys())
            found.differing = self._recorded.differing(n, values)
            if (told := self._recorded.digests.get(n)) is not None:
                found.tensors = [name for name, digest in found.digests.items() if told.get(name) != digest]
        found.cpu_s = float(all_reduce(torch.tensor(time.process_time() - begin, dtype=torch.float64), "sum"))
        return found


def replayed(recorded: Recorded, request: Request) -> Iterator[Row]:
    """The rows of the run as it was, then those of each variant. Raises CheckpointError, ValueError, Damaged."""
    for each in request.variants.values():
        make_algorithm(each)  # a wrong name is told before anything is computed
    config = request.computed or next(iter(request.variants.values()), recorded.config)
    device = "cuda" if recorded.run.learner_device == "cuda" and torch.cuda.is_available() else "cpu"
    ranks = config.learner.ranks if device == "cpu" else min(config.learner.ranks, torch.cuda.device_count())

    yield from on_ranks(ranks, device, partial(_rows, recorded, request, ranks, device))


def _rows(recorded: Recorded, request: Request, ranks: int, device: str, rank: int, folder: Path) -> Iterator[Row]:
    """Of one rank; all go through them together."""
    make = partial(Replay, recorded, rank=rank, ranks=ranks, device=device, exact=request.exact)
    state, at = recorded.state_before(request.first)
    base = make(config=request.computed or recorded.config, saved=state)
    yield base.row(RECORDED, at, {}, time.process_time())

    known: dict[int, Tokens] = {}
    gradients: Gradients = {}
    for step in range(at, request.last):
        first = bool(request.variants) and step == request.first
        if first and step != at:
            state = base.save(folder / "checkpoints", step)
        yield base.again(RECORDED, step, request.trail, gradients if first else None, known=None)
        if request.variants and step >= request.first:
            known[step] = {member: table["log-probabilities"].float() for member, table in base.watch.tokens.items()}

    del base
    for name, config in request.variants.items():
        other = make(config=config, saved=state)
        for step in range(request.first, request.last):
            compared = gradients if step == request.first else None
            try:
                yield other.again(name, step, trail=False, gradients=compared, known=known[step])
            except FloatingPointError as error:
                raise ValueError(f"{name}: {error}; leave it out, or end before that step with --to") from None


def nearness(
    own: Mapping[int, Table], known: Tokens, part: BatchPart, among: dist.ProcessGroup | None = None
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

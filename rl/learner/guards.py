"""What a training step should never do in silence, checked from the step's own data (docs/silent-faults.md).

    guards.batch(batch_part, minibatches)      # before the first optimizer step
    guards.updated(minibatch, stats)      # after each
    guards.trained(metrics, routing)      # after the last

None of `StepGuards` runs the model: log-probabilities, entropies and gradients are those of the step itself.
`ExactCheck` (`alarms.exact`) does. It costs as many copies and forwards as a batch may hold versions: for tests, and
for runs that prove a path.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from zlib import crc32

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from rl.config.schema import Config
from rl.learner.credit import Minibatch, all_reduce, kept_rows, rewarded_rows
from rl.learner.routing import RoutingStats, without_routing
from rl.learner.trainer import Trainer
from rl.learner.update import UpdateStats
from rl.models.lora import waits_for
from rl.models.packing import Pack
from rl.models.protocol import PolicyModel, holding, local
from rl.observe.alarms import Alarms
from rl.wire.messages import BatchPart

_LEAST_TOKENS = 32  # of one age, for a statistic to mean something
_ENTRIES = 32  # looked at of each matrix, to see whether it moves
_CENTRED = ("group", "group_mean", "leave_one_out")  # estimators whose sign the rewards alone say
_TO_GO = ("turn", "batch")  # undiscounted, a turn's and the next one's differ by what it earned
_TINY = 1e-6
_FIRST_STEPS = 3  # whose log-ratio later ones are compared with
_STILL_STEPS = 3  # in a row, after which a single matrix counts; rows of a head may hardly move, as rare tokens do
_NOTABLE = 0.1  # of the limit: a log-ratio below that may grow


class StepGuards:
    """The guards of one rank; all ranks call the same methods in the same order."""

    def __init__(self, trainer: Trainer, config: Config, alarms: Alarms, *, first_step: int) -> None:
        self._trainer = trainer
        self._config = config
        self._alarms = alarms
        self._check = alarms.check

        self._sampled = not config.supervised  # else nobody has, and no log-probability tells of it
        self._first_step = first_step
        self._begun = False
        self._moved = False  # by a step that this process has seen
        self._log_ratio = alarms.limit("log-ratio", _engine_noise(config))
        self._first_gaps: list[float] = []  # of the first steps that show one
        self._first_experts: Tensor | None = None  # (R, E) each one's share of the tokens, of the first batch

        trainable = dict(trainer.weights.trainable())
        self._parameters = list(trainable.values())
        self._matrices = _Matrices(lambda: trainable)
        self._still: Counter[str] = Counter()  # steps in a row, by matrix
        self._reference = None
        if (reference := trainer.reference) is not None:
            self._reference = _Matrices(lambda: {name: tensor for name, tensor, _ in reference.export(untie=False)})
            self._reference_entries = self._reference.entries()

    def batch(self, batch_part: BatchPart, minibatches: list[Minibatch]) -> None:
        """Raises RunAlarm for a batch that must not be trained, or an optimizer that must not train it."""
        self._step = batch_part.step
        self._over = batch_part.over
        self._updates = 0
        self._same_for_all_ranks(batch_part)
        self._tokens(batch_part, minibatches)
        self._signs(batch_part, minibatches)
        self._order(batch_part, minibatches)

        held = sum(tensor.grad is not None for tensor in self._parameters)
        self._check("gradients-kept", held > 0, f"step {batch_part.step} begins with gradients of {held} tensors")
        if self._reference is not None:
            moved = not torch.equal(self._reference.entries(), self._reference_entries)
            self._check("reference-moved", moved, f"it is another one at step {batch_part.step}")

        self._steps = self._counted_steps()
        if not self._begun:
            self._begun = True
            lost = (self._steps == 0) != (batch_part.step == 0)
            self._check(
                "optimizer-steps", lost, f"step {batch_part.step} finds {self._steps:.0f} steps in AdamW's state"
            )
        self._before = self._matrices.entries()

    def updated(self, minibatch: Minibatch, stats: UpdateStats) -> None:
        """To be called after each optimizer step; the first one of a batch still shows the weights that it began
        with."""
        self._updates += 1
        counted = self._counted_steps() - self._steps
        self._check(
            "optimizer-steps", counted != self._updates, f"{counted:.0f} of {self._updates} steps in step {self._step}"
        )
        if self._updates > 1:
            return

        gap = self._at_equal_weights(stats) if self._sampled else math.inf
        if self._step == 0 and self._trainer.algorithm.reference == "start" and gap <= self._log_ratio:
            self._reference_is_start(minibatch.packs)
        (norm,) = stats.steps["train/grad_norm"]
        advantages = any(bool(pack.advantages[pack.mask].any()) for pack in minibatch.packs)
        self._check("gradient-zero", norm == 0 and advantages, f"at step {self._step}")
        self._reference_is_apart(stats)

        if norm and not self._stands_by_schedule():
            still = self._matrices.still(self._before)
            self._moved |= len(still) < len(self._matrices.names)
            self._still = Counter({name: self._still[name] + 1 for name in still})
            long = [name for name in still if self._still[name] >= _STILL_STEPS and "head" not in name]
            wrong = 10 * len(still) > len(self._matrices.names) or bool(long)
            self._check("weights-still", wrong, f"step {self._step} did not move {', '.join((long or still)[:3])}")

    def trained(self, metrics: dict[str, float], routing: RoutingStats) -> None:
        """Of the whole batch, from all ranks."""
        self._experts_live(routing)
        entropy = metrics.get("loss/entropy", math.inf)
        low = entropy < self._alarms.limit("entropy", "nats")
        self._check("entropy", low, f"{entropy:.2g} nats at step {self._step}")
        if not self._sampled:
            return

        ess = metrics.get("loss/ess", 1.0)
        kl = metrics.get("loss/kl_behavior", 0.0)
        far = ess < self._alarms.limit("off-policy", "ess") or kl > self._alarms.limit("off-policy", "kl")
        self._check("off-policy", far, f"effective sample size {ess:.3f} of 1, KL {kl:.3g} at step {self._step}")

        age = max(1.0, metrics.get("loss/token_staleness", 0.0))
        found = f"KL {kl:.2g} to a policy {age:.1f} versions before, at step {self._step}"
        self._check("large-steps", kl > self._alarms.limit("large-steps", "kl") * age**2, found)

    def _experts_live(self, routing: RoutingStats) -> None:
        """Against the first batch: experts that a subject does not need have had few tokens from the beginning."""
        if routing.sums is None:
            return
        experts = routing.sums.experts.cpu()
        if self._first_experts is None:
            self._first_experts = experts / experts.sum(1, keepdim=True)

        expected = self._first_experts * experts.sum(1, keepdim=True)
        lost = torch.where(experts == 0, expected, torch.zeros_like(expected))
        router, expert = divmod(int(lost.argmax()), experts.shape[1])
        found = f"expert {expert} of router {router} had none of {float(lost.max()):.0f} tokens at step {self._step}"
        self._check("dead-expert", float(lost.max()) > self._alarms.limit("dead-expert", "tokens"), found)

    def _same_for_all_ranks(self, batch_part: BatchPart) -> None:
        """Ranks see each other's rows only through this number."""
        seen = crc32(msgspec.msgpack.encode([batch_part.step, batch_part.timeline, batch_part.rows]))
        ends = all_reduce(torch.tensor([seen, -seen]), "max").tolist()
        self._check("ranks-differ", ends != [seen, -seen], f"the rows of step {batch_part.step} differ between ranks")

    def _tokens(self, batch_part: BatchPart, minibatches: list[Minibatch]) -> None:
        kept = torch.tensor([row.loss_tokens for row in batch_part.rows]) * kept_rows(
            batch_part, self._trainer.algorithm
        )  # (N,)
        divided = sum(minibatch.loss_tokens for minibatch in minibatches)
        summed = sum(pack.loss_tokens for minibatch in minibatches for pack in minibatch.packs)
        own = int(kept[sorted(set(batch_part.members))].sum())
        wrong = (divided, summed) != (int(kept.sum()), own)
        step = batch_part.step
        found = f"divided by {divided} tokens of {kept.sum()}, {summed} of this rank's {own} summed in step {step}"
        self._check("loss-tokens", wrong, found)

    def _signs(self, batch_part: BatchPart, minibatches: list[Minibatch]) -> None:
        algorithm = self._trainer.algorithm
        if algorithm.estimator.spec.name not in _CENTRED or algorithm.shapings or algorithm.reward_kl is not None:
            return

        rewards = torch.tensor([row.reward for row in batch_part.rows], dtype=torch.float64)  # (N,)
        _, group = torch.unique(torch.tensor([row.group_id for row in batch_part.rows]), return_inverse=True)  # (N,)
        known = rewarded_rows(batch_part)
        means = torch.zeros_like(rewards).scatter_reduce(0, group[known], rewards[known], "mean", include_self=False)
        expected = rewards - means[group]

        packs = [pack for minibatch in minibatches for pack in minibatch.packs if pack.members]
        if not packs:
            return

        wanted = expected[[member for pack in packs for member in pack.members]]  # (S,)
        begins = accumulate((len(pack.members) for pack in packs), initial=0)
        mask = torch.cat([pack.mask for pack in packs])
        sample = torch.cat([pack.sample + begin for pack, begin in zip(packs, begins, strict=False)])[mask]  # of S
        advantages = torch.cat([pack.advantages for pack in packs])[mask]
        first = torch.full(wanted.shape, math.inf).scatter_reduce(0, sample, advantages, "amin")
        last = torch.full(wanted.shape, -math.inf).scatter_reduce(0, sample, advantages, "amax")

        slack = _TINY * max(1.0, float(rewards.abs().max()))
        wrong = ((wanted > slack) & (first <= 0)) | ((wanted < -slack) & (last >= 0))
        wrong |= (wanted.abs() <= slack) & (torch.maximum(first.abs(), last.abs()) > 1e-3)
        trained = torch.zeros(len(wanted), dtype=torch.bool).index_fill(0, sample, True)
        count = int((wrong & trained).sum())
        self._check("advantage-sign", count > 0, f"{count} samples of step {batch_part.step}")

    def _order(self, batch_part: BatchPart, minibatches: list[Minibatch]) -> None:
        """Look at the first token of each turn, as the batch part itself says where it stands and when it was."""
        algorithm = self._trainer.algorithm
        discount = getattr(algorithm.estimator.options, "discount", 1.0)
        others = algorithm.shapings or algorithm.reward_kl is not None
        if algorithm.estimator.spec.name not in _TO_GO or discount != 1 or others:
            return

        kept = kept_rows(batch_part, algorithm).tolist()
        spread = max(abs(earned) for row in batch_part.rows for earned in row.turn_rewards or [row.reward])
        wrong = 0
        for member, advantages in _by_turn(batch_part, (pack for each in minibatches for pack in each.packs)):
            if not kept[member]:
                continue
            earned = torch.tensor(batch_part.rows[member].turn_rewards[:-1])  # (turns - 1,)
            step = -advantages.diff()
            opposite = (earned.abs() > 1e-3 * spread) & (earned * step <= 0)
            wrong += bool((opposite | ((earned == 0) & (step.abs() > 1e-3))).any())
        self._check("credit-order", wrong > 0, f"{wrong} samples of step {batch_part.step}")

    def _at_equal_weights(self, stats: UpdateStats) -> float:
        """Tokens that the present weights have sampled: nothing but rounding may stand between the two sides. Their
        distance in nats; inf where they are too few."""
        sums = {name: float(values[0]) for name, values in stats.diagnostics.sums.items() if values.ndim == 1}
        tokens = sums.get("tokens", 0.0)
        if tokens < _LEAST_TOKENS:
            return math.inf

        gap = math.sqrt(2 * max(0.0, sums["kl_behavior"]) / tokens)  # k3 is half the square of a small log-ratio
        self._check(
            "log-ratio", gap > self._log_ratio, f"{gap:.3g} nats at step {self._step}, limit {self._log_ratio:g}"
        )

        self._gap_grows(gap)

        # A small part of a batch is chosen by how it ended: of the episodes that an update met in their middle, this
        # batch has those that ended soon after it, and they are those that drew few rare tokens.
        if 2 * tokens >= float(stats.diagnostics.sums["tokens"].sum()):
            self._surprise(sums, tokens)
        return gap

    def _reference_is_start(self, packs: list[Pack]) -> None:
        """The first batch was sampled by the very model that the reference is to be."""
        apart = [
            (pack.logp_reference - pack.logp_behavior)[pack.mask] for pack in packs if pack.logp_reference is not None
        ]
        gap = float(torch.cat(apart).square().mean().sqrt())
        found = f"{gap:.3g} nats from the model of the start, limit {self._log_ratio:g}"
        self._check("reference-moved", gap > self._log_ratio, found)

    def _reference_is_apart(self, stats: UpdateStats) -> None:
        """A policy that has moved is another one than its reference, in the last digit of some token at least."""
        sums = stats.diagnostics.sums
        enough = "kl_reference" in sums and float(sums["tokens"].sum()) >= _LEAST_TOKENS
        same = self._moved and enough and not sums["kl_reference"].any()
        self._check("reference-moved", same, f"it is the policy itself at step {self._step}, which has been trained")

    def _surprise(self, sums: dict[str, float], tokens: float) -> None:
        """Sampled tokens have the mean log-probability that the entropy says, unless another policy drew them."""
        share = self._alarms.limit("surprise", "share")
        errors = self._alarms.limit("surprise", "errors")
        mean = sums["surprise"] / tokens
        entropy = sums["entropy"] / tokens
        # The sample's own variance is too small while the rare tokens that make it have not been drawn.
        variance = max(_TINY, sums["surprise_square"] / tokens - mean**2, sums["surprise_variance"] / tokens)
        error = math.sqrt(variance / tokens)
        wrong = abs(mean) > max(share * entropy, errors * error)
        self._check("surprise", wrong, f"{mean:+.3f} nats beside an entropy of {entropy:.3f} at step {self._step}")

    def _gap_grows(self, gap: float) -> None:
        """Against the largest of the first gaps: rounding alone neither adds up nor grows."""
        if len(self._first_gaps) < _FIRST_STEPS:
            self._first_gaps.append(gap)
            return

        first = max(self._first_gaps)
        most = self._alarms.limit("log-ratio-grows", "times") * first
        grown = gap > max(most, _NOTABLE * self._log_ratio)
        self._check("log-ratio-grows", grown, f"from {first:.2g} to {gap:.2g} nats at step {self._step}")

    def _counted_steps(self) -> float:
        """AdamW's own count; 0 before its first step. It stands beside each tensor, on a GPU: they are read as one."""
        states = self._trainer.optimizer.adamw.state.values()
        counts = [state["step"] for state in states if "step" in state]
        return float(torch.stack(counts).max()) if counts else 0.0

    def _stands_by_schedule(self) -> bool:
        """The critic learns alone, or the learning rate has come down to nothing."""
        learner = self._config.learner
        critic = self._config.algo.critic
        alone = critic is not None and self._step - self._first_step < critic.pretrain_steps
        decays = learner.schedule != "constant" and learner.min_lr_fraction < 0.01
        ends = max(self._over, (self._step + 1) / self._config.steps) >= 0.9
        return alone or (decays and ends)


class _Matrices:
    """A few entries of every matrix of this rank; embeddings are left out, whose rows move only when they are read."""

    def __init__(self, named: Callable[[], Mapping[str, Tensor]]) -> None:
        """named: all tensors of the model as they are at the moment, by name."""
        self._named = named
        found = {name: local(tensor) for name, tensor in named().items() if tensor.ndim > 1 and "embed" not in name}
        self._places = {
            name: torch.linspace(0, rows.numel() - 1, _ENTRIES, device=rows.device).long()
            for name, rows in found.items()
            if rows.numel()
        }
        self.names = list(self._places)

    def entries(self) -> Tensor:
        """(matrices, 32), on the host, wherever the matrices are just now."""
        named = self._named()
        taken = [local(named[name]).reshape(-1)[places] for name, places in self._places.items()]
        return torch.stack(taken).cpu() if taken else torch.zeros(0, _ENTRIES)

    def still(self, before: Tensor) -> list[str]:
        """Names of the matrices that are as they were, and had reason to move."""
        moved = (self.entries() != before).any(1).tolist()
        nothing = {name for name, each in zip(self.names, before.any(1).tolist(), strict=True) if not each}
        still = [name for name, each in zip(self.names, moved, strict=True) if not each]
        return [name for name in still if waits_for(name) not in nothing]


def _by_turn(batch_part: BatchPart, packs: Iterable[Pack]) -> Iterator[tuple[int, Tensor]]:
    """Of each sample its row, and the advantages of its turns' first tokens (turns,) in the order of time."""
    sequences: defaultdict[int, list[int]] = defaultdict(list)
    for i, member in enumerate(batch_part.members):
        sequences[member].append(i)

    for pack in packs:
        begin = 0
        for member in pack.members:
            first: dict[int, int] = {}
            for i in sequences[member]:
                starts = batch_part.turn_starts[i]
                order = batch_part.turn_order[i] if batch_part.turn_order else range(len(starts))
                first |= {place: begin + start for place, start in zip(order, starts, strict=True)}
                begin += batch_part.lengths[i]
            yield member, pack.advantages[[first[place] for place in sorted(first)]]


def _engine_noise(config: Config) -> str:
    """Which limit two implementations have; measured RMS log-ratio: 1e-5 nats in float32, 0.03 in bf16."""
    exact = config.model.dtype == config.generator.dtype == "float32"
    return "float32_nats" if exact and config.generator.on_update != "keep" else "nats"


class ExactCheck:
    """Every token of a batch against the very weights that sampled it; all ranks call `batch` together.

    The guards compare tokens of the present weights only; with `rollout.alpha` of 1 most tokens are older. Here the
    weights of the versions that a batch may hold are kept, put back one after another, and each token's log-probability
    is computed anew by its own.
    """

    def __init__(
        self, policy: PolicyModel, config: Config, alarms: Alarms, among: dist.ProcessGroup | None = None
    ) -> None:
        """among: ranks that have each sample once between them; None: all."""
        self._policy = policy
        self._among = among
        self._alarms = alarms
        self._limit = config.alarms.exact
        self._temperature = config.sampling.temperature
        self._versions = config.rollout.staleness_bound + 1
        self._on_host = config.alternates  # a device that engines have between two batches holds nothing of ours
        self._kept: dict[int, list[Tensor]] = {}  # version -> this rank's rows of every tensor that is trained

    @torch.no_grad()
    def batch(self, step: int, minibatches: list[Minibatch]) -> dict[str, float]:
        """To be called before the first optimizer step of a batch, when the weights are those of version `step`.

        Metrics over all ranks: `exact/max` (nats, largest difference of a token), `exact/tokens` (compared),
        `exact/unknown` (sampled by a version from before this process began), `exact/versions`. Raises RunAlarm beyond
        the limit; nothing is done without one.
        """
        if self._limit is None:
            return {}
        self._kept[step] = [self._copied(local(tensor)) for _, tensor in self._policy.trainable()]
        self._kept.pop(step - self._versions, None)

        gaps = torch.zeros(self._versions, dtype=torch.float64)
        counts = torch.zeros(self._versions, dtype=torch.float64)
        for age in range(self._versions):
            if all_reduce(counts.new_tensor(self._tokens(age, minibatches)), "sum") and step - age in self._kept:
                with holding(self._policy, self._kept[step - age]):
                    gaps[age], counts[age] = self._compare(age, minibatches)

        gap = float(all_reduce(gaps, "max").max())
        counts = all_reduce(counts, "sum", self._among)
        trained = sum(minibatch.loss_tokens for minibatch in minibatches)
        compared = int(counts.sum())
        wrong = not gap <= self._limit  # nan is wrong as well
        self._alarms.check("not-exact", wrong, f"{gap:.3g} nats at step {step}, limit {self._limit:g}")
        return {
            "exact/max": gap,
            "exact/tokens": float(compared),
            "exact/unknown": float(trained - compared),
            "exact/versions": float((counts > 0).sum()),
        }

    def _copied(self, rows: Tensor) -> Tensor:
        return rows.to("cpu", copy=True) if self._on_host else rows.clone()

    def _compare(self, age: int, minibatches: list[Minibatch]) -> tuple[float, int]:
        """Largest difference of this rank's tokens that are `age` versions old, under the weights put in; their count.

        Every pack runs, also one without such tokens: under FSDP the ranks' forwards belong together.
        """
        gaps = [torch.zeros(1)]
        for pack in (_of_age(pack, age) for minibatch in minibatches for pack in minibatch.packs):
            logp = self._policy(pack.to(self._policy.device), temperature=self._temperature).logp
            gaps.append((logp.to(pack.token_ids.device) - pack.logp_behavior)[pack.mask].abs())
        found = torch.cat(gaps)
        return float(found.nan_to_num(math.inf, math.inf).max()), len(found) - 1

    def _tokens(self, age: int, minibatches: list[Minibatch]) -> int:
        packs = (pack for minibatch in minibatches for pack in minibatch.packs)
        return sum(_of_age(pack, age).loss_tokens for pack in packs)


def _of_age(pack: Pack, age: int) -> Pack:
    """The pack, of whose tokens only those count that are `age` versions old. Experts that other weights have chosen
    say nothing of these."""
    mask = pack.mask & (pack.staleness == age)
    return without_routing(pack, mask).with_columns(loss_mask=mask)

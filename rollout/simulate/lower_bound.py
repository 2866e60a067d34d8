"""A lower bound on the time of a simulated run: no schedule of the same trained episodes on this machine undercuts it.

Counted is only what was trained, with the lengths and latencies it had: cut-off and redundant episodes, prefills,
weight loads and messages are left out, so the bound holds with redundancy and failures too. With t(n) the publication
of version n, S = ceil(alpha), and train(s) the training of batch s:

* generators: tokens / (generators x best rate of one) <= t(end);
* environments: the sum of the episodes' shortest times / episodes at once <= t(end);
* learner: the sum of train(s) <= t(end), one after the other;
* chains: an episode of batch s samples its first token at version s - S or later, so after t(s - S), and ends before
  batch s is trained: t(s + 1) - t(s - S) >= train(s) + the largest of its longest episode and its work / capacity of
  generators and of environments. Steps S + 1 apart do not overlap, so their sum is a bound, in each of S + 1 phases.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.broker.actions import EmitBatch, Outcome
from rollout.simulate.setting import Engine, Setting


def lower_bound_s(setting: Setting, batches: Sequence[EmitBatch]) -> float:
    """Seconds from the first version to the publication of the last batch's; `batches` are the run's, in order."""
    trains = [_train_s(setting, batch) for batch in batches]
    generates, holds, spans = [], [], []
    for batch in batches:
        outcomes = [sample.outcome for sample in batch.samples]
        chains = [_alone_s(setting.engine, outcome) for outcome in outcomes]
        generates.append(sum(map(_decoded, outcomes)) / (setting.engine.count * _best_rate(setting.engine)))
        holds.append(sum(chains) / (setting.servers.count * setting.servers.capacity))
        spans.append(max(generates[-1], holds[-1], max(chains)))
    apart = setting.broker.staleness_bound + 1
    steps = [span + train for span, train in zip(spans, trains, strict=True)]
    phases = [sum(steps[phase::apart]) for phase in range(min(apart, len(steps)))]
    return max(sum(generates) + trains[-1], sum(holds) + trains[-1], sum(trains), *phases)


def _train_s(setting: Setting, batch: EmitBatch) -> float:
    trainer = setting.trainer
    tokens = sum(sample.outcome.length for sample in batch.samples)
    seconds = trainer.step_s + trainer.per_sample_s * len(batch.samples) + trainer.per_token_s * tokens
    return seconds + trainer.publish_s


def _decoded(outcome: Outcome) -> int:
    """Tokens from decode steps; the first one of a turn comes with its prefill."""
    return outcome.length - outcome.turns


def _alone_s(engine: Engine, outcome: Outcome) -> float:
    """An episode from its first token on, on an idle machine; its environment's seconds are the payload."""
    return _decoded(outcome) * engine.decode_base_s + float(outcome.payload or 0.0)


def _best_rate(engine: Engine) -> float:
    """Tokens a second of one generator: with all seats taken, or with one if sequences slow each other down so much."""
    full = engine.max_num_seqs
    return max(full / (engine.decode_base_s + engine.decode_per_seq_s * (full - 1)), 1 / engine.decode_base_s)

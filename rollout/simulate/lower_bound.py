"""A lower bound on the time of a simulated run: no schedule of the same trained episodes on this machine undercuts it.

Only what was trained is counted, with the lengths and latencies it had. Cut-off and redundant episodes, prefills,
weight loads and messages are left out, so the bound holds with redundancy and failures too. With t(n) the publication
of version n, S the bound on staleness, and train(s) the training of batch s:

* generators: tokens / (generators x best rate of one) <= t(end);
* environments: the sum of the episodes' shortest times / episodes at once <= t(end);
* learner: the sum of train(s) <= t(end), one after the other;
* chains: t(s + 1) - t(s - S) >= train(s) + the largest of the batch's longest episode and its work / capacity of
  generators and of environments. For an episode of batch s samples its first token at version s - S or later, so after
  t(s - S), and ends before batch s is trained. Steps S + 1 apart do not overlap, so their sum is a bound, in each of S
  + 1 phases.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.broker.actions import EmitBatch, EpisodeOutcome
from rollout.simulate.scenario import Generators, Scenario


def lower_bound_s(scenario: Scenario, batches: Sequence[EmitBatch]) -> float:
    """Seconds from the first version to the publication of the last batch's; `batches` are the run's, in order."""
    machines = scenario.generators
    places = scenario.servers.count * scenario.servers.capacity
    generation: list[float] = []
    environments: list[float] = []
    training: list[float] = []
    steps: list[float] = []

    for batch in batches:
        outcomes = [sample.outcome for sample in batch.samples]
        chains = [_alone_s(machines, outcome) for outcome in outcomes]
        generation.append(sum(map(_decoded, outcomes)) / (machines.count * _best_rate(machines)))
        environments.append(sum(chains) / places)
        training.append(scenario.training.seconds(batch) + scenario.training.publish_s)
        steps.append(max(generation[-1], environments[-1], max(chains)) + training[-1])

    apart = scenario.broker.staleness_bound + 1
    phases = [sum(steps[phase::apart]) for phase in range(min(apart, len(steps)))]

    return max(sum(generation) + training[-1], sum(environments) + training[-1], sum(training), *phases)


def _decoded(outcome: EpisodeOutcome) -> int:
    """Tokens from decode steps; the first one of a turn comes with its prefill."""
    return outcome.length - outcome.turns


def _alone_s(machines: Generators, outcome: EpisodeOutcome) -> float:
    """An episode from its first token on, on an idle machine; its environment's seconds are the payload."""
    return _decoded(outcome) * machines.decode_base_s + float(outcome.payload or 0.0)


def _best_rate(machines: Generators) -> float:
    """Tokens a second of one generator: full, or with one sequence if sequences slow each other down so much."""
    full = machines.max_num_seqs
    step_s = machines.decode_base_s + machines.decode_per_seq_s * (full - 1)

    return max(full / step_s, 1 / machines.decode_base_s)

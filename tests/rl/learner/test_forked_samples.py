"""What a sample weighs does not depend on into how many sequences its history forked.

Each sample is played once as one sequence, and once cut at random turns into several ones that repeat what came before
(masked). Broker and learner then credit both with the production code, and every trained token must come out alike.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from algos.registry import get_advantage, make_loss, registered
from experiments.columns import token_columns
from rl.config.schema import load_config
from rl.learner.algorithm import Algorithm, make_algorithm
from rl.learner.batches import check_batch_part
from rl.learner.credit import Minibatch, assign, kept_rows, mask_rows
from rl.learner.update import loss_inputs
from rl.models.packing import Pack, make_packs, split_minibatches
from rl.models.protocol import PolicyOutput
from rl.wire.messages import BatchPart, Ticket, TokenSequence, Trajectory, Turn, Version
from rollout.broker.actions import BatchSample, EmitBatch
from rollout.broker.assembly import make_batch_parts, outcome_of
from rollout.broker.validation import fault
from tests.rollout.trajectories import make_trajectory

VOCABULARY = 100_000
STEP = 7
SETTINGS = ("rollout.groups_per_batch=2", "rollout.group_size=3", "sampling.max_tokens=8", "env.max_turns=5")
Found = dict[int, dict[str, float]]


def whole(chance: random.Random, sample: int) -> Trajectory:
    """One sequence of one to five turns; every sampled id occurs once in the batch, so it names its token."""
    ids: list[int] = []
    mask: list[int] = []
    turns: list[Turn] = []
    version = 5
    versions: list[int] = []
    for turn in range(chance.randint(1, 5)):
        read = [chance.randrange(1, 3) for _ in range(chance.randint(1, 3))]
        made = [1000 * (sample + 1) + 100 * turn + k for k in range(chance.randint(1, 6))]
        version = chance.choice([version, version, STEP])
        start = len(ids) + len(read)
        turns.append(Turn(start, start + len(made), chance.random(), 0, 0, "stop", 0, turn))
        ids += read + made
        mask += [0] * len(read) + [1] * len(made)
        versions += [-1] * len(read) + [version] * len(made)

    columns = token_columns(ids, mask, logp_behavior=-np.modf(np.array(ids) * 0.37)[0] - 0.1, policy_version=versions)
    ticket = Ticket(sample + 1, sample, sample // 3, sample // 3, Version(0, 5))
    reward = sum(turn.reward for turn in turns)
    base = make_trajectory(ticket, 1, reward)
    return replace(base, sequences=[TokenSequence(columns=columns, turns=turns)], tokens_generated=sum(mask))


def forked(chance: random.Random, trajectory: Trajectory) -> Trajectory:
    """The same, cut before some turns: each part repeats what was before, or has forgotten a piece of it."""
    (sequence,) = trajectory.sequences
    sequences = []
    first = 0
    for end in range(1, len(sequence.turns) + 1):
        if end < len(sequence.turns) and chance.random() < 0.5:
            continue

        shared = sequence.turns[first - 1].end if first else 0
        columns = {name: values[: sequence.turns[end - 1].end].copy() for name, values in sequence.columns.items()}
        for name, masked in (("loss_mask", 0), ("policy_version", -1), ("logp_behavior", 0)):
            columns[name][:shared] = masked
        sequences.append(TokenSequence(columns=columns, turns=sequence.turns[first:end], shared=shared))
        first = end
    return replace(trajectory, sequences=sequences)


def batch_parts_of(trajectories: list[Trajectory], ranks: int = 1) -> list[BatchPart]:
    for trajectory in trajectories:
        ticket = Ticket(
            trajectory.ticket_id, trajectory.sample_id, trajectory.group_id, trajectory.task_index, Version(0, 5)
        )
        assert not fault(trajectory, ticket, Version(0, STEP), VOCABULARY)
    samples = [BatchSample(t.sample_id, t.group_id, t.task_index, 5, outcome_of(t)) for t in trajectories]
    batch_parts = make_batch_parts(EmitBatch(STEP, samples, {}), timeline=0, ranks=ranks)
    for batch_part in batch_parts:
        check_batch_part(batch_part, step=STEP, rank=batch_part.rank, timeline=0, staleness_bound=2)
    return batch_parts


def minibatches_of(batch_part: BatchPart, algorithm: Algorithm, count: int) -> list[Minibatch]:
    kept = kept_rows(batch_part, algorithm)
    parts = [mask_rows(make_packs(part, 40, STEP), kept) for part in split_minibatches(batch_part, count)]
    if algorithm.critic is not None:
        parts = [[pack.with_columns(values=torch.sin(pack.token_ids.float())) for pack in part] for part in parts]
    return assign(batch_part, parts, algorithm)


def credited(batch_part: BatchPart, algorithm: Algorithm, loss: str, options: dict[str, object]) -> Found:
    """Of every trained token, by its id: advantage, weight, staleness and loss."""
    made = make_loss(loss, options)
    found: Found = {}
    for minibatch in minibatches_of(batch_part, algorithm, 2):
        for pack in minibatch.packs:
            near = pack.logp_behavior + 0.1 * torch.cos(pack.token_ids.float())
            pack = pack.with_columns(logp_proximal=near)
            inputs = loss_inputs(pack, output_of(pack), needs_proximal=made.needs_proximal)
            inputs = dataclasses.replace(inputs, columns={**inputs.columns, "teacher_logp": near})
            values = made(inputs).per_token * pack.token_weights / minibatch.loss_tokens
            for place in pack.mask.nonzero()[:, 0].tolist():
                assert int(pack.token_ids[place]) not in found, "a token is trained twice"
                found[int(pack.token_ids[place])] = {
                    "advantage": float(pack.advantages[place]),
                    "staleness": float(pack.staleness[place]),
                    "loss": float(values[place]),
                    "reward": float(pack.rewards[pack.sample[place]]),
                }
    return found


def output_of(pack: Pack) -> PolicyOutput:
    """Log-probabilities that depend on nothing but the token."""
    ids = pack.token_ids.float()
    return PolicyOutput(logp=pack.logp_behavior + 0.3 * torch.sin(ids), entropy=torch.ones_like(ids))


def batches(seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    chance = random.Random(seed)
    plain = [whole(chance, sample) for sample in range(6)]
    return plain, [forked(chance, trajectory) for trajectory in plain]


def same(plain: Found, other: Found) -> None:
    assert plain.keys() == other.keys()
    for token, values in plain.items():
        assert other[token] == pytest.approx(values, rel=1e-5, abs=1e-7), token


@pytest.mark.parametrize("advantage", registered("advantage"))
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_advantages_and_weights(advantage: str, aggregation: str) -> None:
    overrides = [f"algo.advantage={advantage}", f"algo.aggregation={aggregation}"]
    if get_advantage(advantage).needs_values:
        overrides.append("algo.critic={}")
    algorithm = make_algorithm(load_config(None, [*SETTINGS, *overrides]))

    for seed in range(5):
        plain, other = (batch_parts_of(batch)[0] for batch in batches(seed))
        same(credited(plain, algorithm, "ppo", {}), credited(other, algorithm, "ppo", {}))


@pytest.mark.parametrize("loss", registered("loss"))
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_losses_with_ratios_of_whole_sequences(loss: str, seed: int) -> None:
    algorithm = make_algorithm(load_config(None, list(SETTINGS)))
    plain, other = (batch_parts_of(batch)[0] for batch in batches(seed))
    same(credited(plain, algorithm, loss, {}), credited(other, algorithm, loss, {}))


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 3))
def test_a_sample_stays_on_one_rank_and_is_as_old_as_its_oldest_token(seed: int, ranks: int) -> None:
    plain, other = batches(seed)
    batch_parts = batch_parts_of(other, ranks)
    (expected,) = batch_parts_of(plain)
    owners = [set(batch_part.members) for batch_part in batch_parts]
    assert sum(map(len, owners)) == 6 and set().union(*owners) == set(range(6))
    for batch_part in batch_parts:
        for row, wanted in zip(batch_part.rows, expected.rows, strict=True):
            assert replace(row, tokens=0) == replace(wanted, tokens=0)
    for one, several in zip(plain, other, strict=True):
        assert outcome_of(one).version == outcome_of(several).version
        assert outcome_of(one).turns == outcome_of(several).turns

"""Credit goes by time, whatever sequences the turns of an episode stand in.

Random agents branch, ask sub-agents, begin anew from a summary, and ask twice at once. The production path makes rows
and packs of what they did; every advantage and every shaping is compared with a plain list of the turns in time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from zlib import crc32

import pytest
import torch
from msgspec.structs import replace

from algos.advantages import Episodes, make_estimator
from algos.registry import get_advantage, registered
from algos.rewards import RewardInputs, make_shaping
from experiments.gateway.tokenizers import make_folder
from rl.config.schema import load_config
from rl.learner.algorithm import Algorithm, make_algorithm
from rl.learner.batches import check_batch_part
from rl.learner.credit import assign, gather_episodes, kept_rows, mask_rows
from rl.models.packing import make_packs, split_minibatches
from rl.wire.messages import BatchPart, Ticket, TokenSequence, Trajectory, Turn, Version
from rollout.broker.actions import BatchSample, EmitBatch
from rollout.broker.assembly import make_batch_parts, outcome_of
from rollout.broker.validation import fault
from rollout.episodes.environment import ChatMessage, Outcome
from rollout.episodes.foreign import _rewarded
from rollout.episodes.forest import Forest, ForestTurn
from rollout.episodes.parsing import PlainParser, TurnReader
from rollout.episodes.tokenizer import ChatTokenizer
from tests.rollout.trajectories import finish, make_trajectory, reply_columns, turns_apart, with_sequence

STEP = 4
VOCABULARY = 1 << 31
SETTINGS = ("rollout.groups_per_batch=2", "rollout.group_size=3", "sampling.max_tokens=16", "env.max_turns=5")
SHAPINGS = {  # so that each does something; what is registered later is tried with its own defaults
    "affine": "{scale: 2.0, shift: -1.0}",
    "truncation": "{scale: 0.5, shift: -0.25}",
    "overlong": "{max_tokens: 40, buffer: 20}",
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(make_folder("qwen3", tmp_path_factory.mktemp("templates") / "qwen3"))


@dataclass
class PlainTurn:
    """`tokens` are named by their log-probabilities, which differ from each other."""

    tokens: list[float]
    reward: float
    state: int


@dataclass
class Played:
    """One episode as it was delivered, and its turns in time."""

    trajectory: Trajectory
    turns: list[PlainTurn]


@dataclass
class Agent:
    """An agent at random: `histories` are what it may go on from."""

    chance: random.Random
    chat: ChatTokenizer
    logp: Callable[[], float]
    histories: list[list[ChatMessage]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.forest = Forest(TurnReader(self.chat, PlainParser()))

    def play(self, sample: int) -> Played:
        for _ in range(self.chance.randint(1, 5)):
            asked = [self.ask() for _ in range(self.chance.choice([1, 1, 2]))]
            self.chance.shuffle(asked)  # who is answered first
            for turn in asked:
                self.answer(turn)

        chance = self.chance
        turns = self.forest.turns
        some = {f"resp-{turn.number}": chance.choice([0.5, -0.25]) for turn in turns if chance.random() < 0.4}
        sequences = _rewarded(self.forest, Outcome(chance.choice([0.0, 1.0]), True, some))
        told = [PlainTurn(t.sampled["logp_behavior"].tolist(), t.reward, crc32(t.read.data)) for t in turns]
        return Played(delivered(sample, sequences, chance.choice(["done", "length"])), told)

    def ask(self) -> ForestTurn:
        """Go on, branch, ask a sub-agent, or begin again from a summary."""
        number = len(self.forest.turns)
        opening = self.chance.choice(["you lead", f"you help {number}"])
        new = [ChatMessage("system", opening), ChatMessage("user", f"task {number}")]
        before = self.chance.choice(self.histories) if self.histories and self.chance.random() < 0.7 else new
        return self.forest.attach(before)

    def answer(self, turn: ForestTurn) -> None:
        said = f"{'word ' * self.chance.randint(0, 3)}{self.chance.random():.3f}"
        ids = [*self.chat.encode(said), self.chat.stop_ids[0]]
        turn.growing.append_generated(reply_columns(ids, [self.logp() for _ in ids], STEP))
        message = finish(self.forest, turn, "stop")
        self.forest.answered(turn, message)
        self.histories.append([*turn.history, message, ChatMessage("user", f"and {len(self.forest.turns)}")])


def delivered(sample: int, sequences: list[TokenSequence], stop_reason: str = "done") -> Trajectory:
    ticket = Ticket(sample + 1, sample, sample // 3, sample // 3, Version(0, STEP))
    base = make_trajectory(ticket, 1, math.fsum(turn.reward for each in sequences for turn in each.turns))
    tokens = sum(int(each.loss_mask.sum()) for each in sequences)
    return replace(base, sequences=sequences, tokens_generated=tokens, stop_reason=stop_reason)


def play(seed: int, chat: ChatTokenizer) -> list[Played]:
    """A batch of two groups of three."""
    chance = random.Random(seed)
    numbers = iter(range(1 << 20))
    return [Agent(chance, chat, lambda: -(1 + next(numbers)) / 1024).play(sample) for sample in range(6)]


def batch_part_of(played: list[Played]) -> BatchPart:
    trajectories = [each.trajectory for each in played]
    for t in trajectories:
        ticket = Ticket(t.ticket_id, t.sample_id, t.group_id, t.task_index, Version(0, STEP))
        assert not fault(t, ticket, Version(0, STEP), VOCABULARY)
    (batch_part,) = batch_parts(trajectories)
    check_batch_part(batch_part, step=STEP, rank=0, timeline=0, staleness_bound=2)
    return batch_part


def batch_parts(trajectories: list[Trajectory], ranks: int = 1) -> list[BatchPart]:
    samples = [BatchSample(t.sample_id, t.group_id, 0, STEP, outcome_of(t)) for t in trajectories]
    return make_batch_parts(EmitBatch(STEP, samples, {}), 0, ranks)


def value_of(logp: torch.Tensor) -> torch.Tensor:
    return torch.sin(1000 * logp)


def credited(batch_part: BatchPart, algorithm: Algorithm, column: str, minibatches: int = 2) -> dict[float, float]:
    kept = kept_rows(batch_part, algorithm)
    parts = [mask_rows(make_packs(part, 60, STEP), kept) for part in split_minibatches(batch_part, minibatches)]
    if algorithm.critic is not None:
        parts = [[pack.with_columns(values=value_of(pack.logp_behavior)) for pack in part] for part in parts]
    packs = [pack for minibatch in assign(batch_part, parts, algorithm) for pack in minibatch.packs]
    names = [logp for pack in packs for logp in pack.logp_behavior[pack.mask].tolist()]
    assert len(names) == len(set(names)), "a token is trained twice"
    return dict(zip(names, [x for pack in packs for x in pack.columns[column][pack.mask].tolist()], strict=True))


def in_time(played: list[Played], shaped: list[float] | None = None) -> Episodes:
    """What an estimator is to see: all turns of the first episode as they came, then those of the next."""
    turns = [turn for each in played for turn in each.turns]
    rewards = torch.tensor([turn.reward for turn in turns], dtype=torch.float64)
    for last, each, wanted in zip(accumulate(len(each.turns) for each in played), played, shaped or [], strict=False):
        rewards[last - 1] += wanted - math.fsum(turn.reward for turn in each.turns)

    lengths = torch.tensor([len(turn.tokens) for turn in turns])
    token_rewards = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    token_rewards[lengths.cumsum(0) - 1] = rewards
    return Episodes(
        group=torch.tensor([each.trajectory.group_id for each in played]),
        turn_rewards=rewards,
        turn_sample=torch.tensor([i for i, each in enumerate(played) for _ in each.turns]),
        turn_state=torch.tensor([turn.state for turn in turns]),
        token_rewards=token_rewards,
        token_turn=torch.arange(len(turns)).repeat_interleave(lengths),
        mask=torch.ones(len(token_rewards), dtype=torch.bool),
        values=value_of(torch.tensor([logp for turn in turns for logp in turn.tokens])),
    )


def by_name(played: list[Played], values: torch.Tensor) -> dict[float, float]:
    names = [logp for each in played for turn in each.turns for logp in turn.tokens]
    return dict(zip(names, values.tolist(), strict=True))


def algorithm_of(advantage: str, *overrides: str) -> Algorithm:
    critic = ["algo.critic={}"] if get_advantage(advantage).needs_values else []
    return make_algorithm(load_config(None, [*SETTINGS, f"algo.advantage={advantage}", *critic, *overrides]))


@pytest.mark.parametrize("advantage", registered("advantage"))
def test_every_advantage_heeds_time(chat: ChatTokenizer, advantage: str) -> None:
    algorithm = algorithm_of(advantage)
    forks = 0
    for seed in range(25):
        played = play(seed, chat)
        forks += sum(len(each.trajectory.sequences) > 1 for each in played)
        expected = by_name(played, make_estimator(advantage, {})(in_time(played)))
        assert credited(batch_part_of(played), algorithm, "advantages") == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert forks > 60


@pytest.mark.parametrize("shaping", registered("shaping"))
@pytest.mark.parametrize("advantage", ["turn", "batch", "gigpo"])
def test_what_a_shaping_adds_is_earned_at_the_end_in_time(chat: ChatTokenizer, shaping: str, advantage: str) -> None:
    options = SHAPINGS.get(shaping, "{}")
    algorithm = algorithm_of(advantage, f"algo.shaping=[{{{shaping}: {options}}}]")
    for seed in range(15):
        played = play(seed, chat)
        inputs = RewardInputs(
            rewards=torch.tensor([each.trajectory.reward for each in played], dtype=torch.float64),
            group=torch.tensor([each.trajectory.group_id for each in played]),
            tokens=torch.tensor([sum(len(turn.tokens) for turn in each.turns) for each in played]),
            turns=torch.tensor([len(each.turns) for each in played]),
            truncated=torch.tensor([each.trajectory.stop_reason != "done" for each in played]),
            max_tokens=algorithm.max_tokens,
        )
        (made,) = algorithm.shapings
        shaped = make_shaping(shaping, vars(made.options))(inputs).tolist()
        expected = by_name(played, make_estimator(advantage, {})(in_time(played, shaped)))
        assert credited(batch_part_of(played), algorithm, "advantages") == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("discount", "lam"), [(1.0, 1.0), (0.9, 0.7)])
def test_the_critic_regresses_to_returns_in_time(chat: ChatTokenizer, discount: float, lam: float) -> None:
    """By the definition, one token after another from the last one back, with nothing of the project's."""
    options = f"algo.advantage={{gae: {{discount: {discount}, normalise: false}}}}"
    algorithm = algorithm_of("gae", options, f"algo.critic.lam={lam}")
    for seed in range(15):
        played = play(seed, chat)
        expected: dict[float, float] = {}
        for each in played:
            tokens = [(name, 0.0) for turn in each.turns for name in turn.tokens]
            for last, turn in zip(accumulate(len(turn.tokens) for turn in each.turns), each.turns, strict=True):
                tokens[last - 1] = (turn.tokens[-1], turn.reward)

            advantage = following = 0.0
            for name, earned in reversed(tokens):
                value = float(value_of(torch.tensor(name)))
                advantage = earned + discount * following - value + discount * lam * advantage
                following = value
                expected[name] = advantage + value
        assert credited(batch_part_of(played), algorithm, "returns") == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("advantage", ["turn", "batch", "gae"])
def test_a_helper_of_a_won_episode_is_praised_like_its_lead(chat: ChatTokenizer, advantage: str) -> None:
    """The lead asks, a helper is asked once, the lead ends: with one reward at the end all of it is worth the same."""
    numbers = iter(range(1 << 20))
    played = []
    for sample, reward in enumerate([1.0, 1.0, 0.0, 0.0, 1.0, 0.0]):
        agent = Agent(random.Random(sample), chat, lambda: -(1 + next(numbers)) / 1024)
        agent.answer(agent.forest.attach([ChatMessage("system", "you lead"), ChatMessage("user", "task")]))
        agent.answer(agent.forest.attach([ChatMessage("system", "you help"), ChatMessage("user", "a part")]))
        agent.answer(agent.forest.attach(agent.histories[0]))
        sequences = _rewarded(agent.forest, Outcome(reward, reward > 0))
        assert [len(sequence.turns) for sequence in sequences] == [2, 1]
        turns = [PlainTurn(t.sampled["logp_behavior"].tolist(), t.reward, 0) for t in agent.forest.turns]
        played.append(Played(delivered(sample, sequences), turns))

    flat = [] if advantage != "gae" else ["algo.advantage={gae: {lam: 1.0}}"]
    found = credited(batch_part_of(played), algorithm_of(advantage, *flat), "advantages")
    for each in played:
        lead, helper, end = ([found[name] for name in turn.tokens] for turn in each.turns)
        won = 1 if each.trajectory.reward else -1
        if advantage == "gae":  # values differ from token to token
            assert won * sum(helper) / len(helper) > 0
        else:
            assert lead + helper + end == pytest.approx([lead[0]] * len(lead + helper + end))
            assert won * helper[0] > 0.3


def test_an_episode_of_one_sequence_is_exactly_as_before() -> None:
    """Turns are numbered now; without the numbers, which an older environment server leaves out, nothing changes."""
    turns = [Turn(2, 4, 0.5, 0.1, 0.0, "stop", 0, 0), Turn(4, 6, 0.25, 0.1, 0.0, "stop", 0, 1)]
    told = [with_sequence(make_trajectory(Ticket(i, i, i // 3, 0, Version(0, STEP)), 1, 0.75), turns) for i in range(6)]
    silent = [with_sequence(each, [replace(turn, number=0) for turn in turns]) for each in told]
    for one, other in zip(batch_parts(told, 2), batch_parts(silent, 2), strict=True):
        assert (one.rows, one.turn_order) == (other.rows, other.turn_order)
        assert one.rows[0].turn_rewards == [0.5, 0.25] and set(map(tuple, one.turn_order)) == {(0, 1)}

        packs = make_packs(one, 60, STEP)
        _, place = gather_episodes(one, packs, torch.full((6,), 0.75, dtype=torch.float64), algorithm_of("turn"))
        assert place.tolist() == list(range(len(place)))


def test_turns_whose_order_is_not_known_are_refused() -> None:
    ticket = Ticket(1, 0, 0, 0, Version(0, STEP))
    plain = with_sequence(
        make_trajectory(ticket, 1, 0.75),
        turns=[Turn(2, 4, 0.5, 0.1, 0.0, "stop", 0, 0), Turn(4, 6, 0.25, 0.1, 0.0, "stop", 0, 1)],
    )
    plain = replace(plain, reward=0.75)
    apart = replace(plain, sequences=turns_apart(plain.sequence))
    assert not fault(plain, ticket, Version(0, STEP), VOCABULARY)
    assert not fault(apart, ticket, Version(0, STEP), VOCABULARY)

    equal = [replace(each, turns=[replace(turn, number=0) for turn in each.turns]) for each in apart.sequences]
    wrong = fault(replace(apart, sequences=equal), ticket, Version(0, STEP), VOCABULARY)
    assert wrong == "turns: two sequences have one of number 0: which came first is not known"
    backwards = with_sequence(plain, turns=[replace(turn, number=9 - turn.number) for turn in plain.turns])
    assert "stands before a smaller one" in fault(backwards, ticket, Version(0, STEP), VOCABULARY)

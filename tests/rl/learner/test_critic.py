"""The critic under packing, against autograd, and PPO with GAE against a loop that shares none of its code."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from rl.config.schema import Config, load_config
from rl.learner.trainer import Trainer
from rl.learner.update import CriticStats, UpdateStats, accumulate_critic, with_values
from rl.models.packing import Pack, dummy_pack, make_packs, sequence_pack
from rl.models.policy import Critic
from rl.wire.messages import BatchPart
from tests.rl.learner.learner_harness import make_batch
from tests.rl.learner.tiny_policies import VOCAB, save_tiny, stock_attention

LR = 5e-3
CRITIC_LR = 1e-2
EPS = 1e-3
TEMPERATURE = 0.7
LAM = 0.9
CRITIC_LAM = 0.95
BETA = 0.05
ENTROPY = 0.02
SETTINGS = (
    "model.dtype=float32",
    f"sampling.temperature={TEMPERATURE}",
    f"learner.lr={LR}",
    f"learner.eps={EPS}",
    "learner.max_tokens_per_pack=48",
    "rollout.groups_per_batch=4",
    "rollout.group_size=2",
    "env.max_turns=2",
    "algo.loss=ppo",
    f"algo.advantage={{gae: {{lam: {LAM}}}}}",
    f"algo.critic={{lr: {CRITIC_LR}, lam: {CRITIC_LAM}}}",
    f"algo.entropy_coef={ENTROPY}",
    f"algo.kl={{coef: {BETA}, place: reward, estimator: k1}}",
    "algo.aggregation=sequence",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture
def critic(folder: Path) -> Critic:
    """With a head that is not zero."""
    made = Critic.load(folder)
    torch.manual_seed(1)
    torch.nn.init.normal_(made.head.weight, std=0.3)
    torch.nn.init.constant_(made.head.bias, 0.2)
    return made


def two_turn_batch_part(step: int) -> BatchPart:
    (batch_part,) = make_batch(step, vocab=VOCAB)
    rows = [
        msgspec.structs.replace(row, turn_rewards=[0.5 * (i % 3), row.reward], reward=row.reward + 0.5 * (i % 3))
        for i, row in enumerate(batch_part.rows)
    ]
    return msgspec.structs.replace(batch_part, rows=rows)


def samples(batch_part: BatchPart) -> list[tuple[Tensor, Tensor, Tensor, list[int]]]:
    """(ids, generated, log-probabilities when sampled, starts of turns) of each sample."""
    bounds = np.cumsum([0, *batch_part.lengths])
    found = []
    for i in range(len(batch_part.members)):
        span = slice(bounds[i], bounds[i + 1])
        ids = torch.tensor(batch_part.token_ids[span], dtype=torch.int64)
        mask = torch.tensor(batch_part.loss_mask[span] != 0)
        found.append((ids, mask, torch.tensor(batch_part.logp_behavior[span]), batch_part.turn_starts[i]))
    return found


def plain_values(critic: Critic, ids: Tensor) -> Tensor:
    """(T,) value of the context before each token; of the first token nothing."""
    with stock_attention(critic.model):
        hidden = critic.model(ids[None], use_cache=False).last_hidden_state[0, :-1]
    return torch.cat((torch.zeros(1), critic.head(hidden)[:, 0]))


def with_returns(packs: list[Pack]) -> list[Pack]:
    return [pack.with_columns(returns=torch.cos(pack.token_ids.float())) for pack in packs]


# ---------------------------------------------------------------- values and gradients


def test_a_new_critic_values_everything_at_zero(folder: Path) -> None:
    (pack, *_) = make_packs(two_turn_batch_part(0), 48, 0)
    (valued,) = with_values(Critic.load(folder), [pack])
    assert valued.values is not None and not valued.values.any()


def test_values_under_packing_are_those_of_each_sample_alone(critic: Critic) -> None:
    batch_part = two_turn_batch_part(0)
    packs = with_values(critic, make_packs(batch_part, 48, 0))
    assert 1 < len(packs) < len(batch_part.members)
    alone = samples(batch_part)
    for pack in packs:
        assert pack.values is not None
        for place, member in enumerate(pack.members):
            ids, mask, _, _ = alone[member]
            expected = torch.where(mask, plain_values(critic, ids), 0)
            torch.testing.assert_close(pack.values[pack.sample == place], expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradient_and_loss_are_those_of_the_mean_over_tokens(critic: Critic, clip: float | None) -> None:
    batch_part = two_turn_batch_part(0)
    packs = with_returns(with_values(critic, make_packs(batch_part, 48, 0)) + with_values(critic, [dummy_pack()]))
    with torch.no_grad():
        critic.head.bias.add_(0.1)  # values have moved since the batch arrived
    stats = accumulate_critic(critic, packs, global_tokens=batch_part.loss_tokens, clip=clip)
    found = {
        name: parameter.grad.clone() for name, parameter in critic.named_parameters() if parameter.grad is not None
    }
    critic.zero_grad()
    total = torch.zeros(())

    for ids, mask, _, _ in samples(batch_part):
        values = plain_values(critic, ids)[mask]
        returns = torch.cos(ids.float())[mask]
        loss = (values - returns) ** 2 / 2
        if clip is not None:
            before = values.detach() - 0.1
            near = torch.minimum(torch.maximum(values, before - clip), before + clip)
            loss = torch.maximum(loss, (near - returns) ** 2 / 2)

        total = total + loss.sum() / batch_part.loss_tokens
    total.backward()
    assert stats.metrics()["critic/loss"] == pytest.approx(total.item(), rel=1e-5)
    for name, parameter in critic.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_values_of_a_critic_in_bfloat16_differ_by_less_than_one_in_a_hundred(folder: Path) -> None:
    """Else neighbouring tokens would be equally good: at 50 numbers of bfloat16 are a quarter apart."""
    critic = Critic.load(folder).to(torch.bfloat16)
    with torch.no_grad():
        critic.head.weight.normal_(std=0.01)
        critic.head.bias.fill_(50.0)
        values = critic(sequence_pack(np.random.default_rng(0).integers(0, VOCAB, 500).tolist()))
    assert values.dtype == torch.float32
    assert len(values.unique()) > 250 and values[1:].std() < 1


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 4.0]).double()
    values = torch.tensor([1.0, 2.5, 3.0]).double()
    stats = CriticStats()
    for part in (slice(0, 1), slice(1, 3)):
        r = returns[part]
        v = values[part]
        parts = [torch.tensor(float(len(r))), r.sum() * 0, r.sum(), (r**2).sum(), ((r - v) ** 2).sum()]
        stats.add(CriticStats(torch.stack([one.double() for one in parts])))
    expected = 1 - float(((returns - values) ** 2).mean() / returns.var(correction=0))
    assert stats.metrics()["critic/explained_variance"] == pytest.approx(expected)
    assert CriticStats().metrics() == {}


# ---------------------------------------------------------------- the whole of PPO with GAE


class PlainPPO:
    """Each sample alone, every quantity from its formula, torch's AdamW; KL charged to the reward, entropy bonus."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.reference = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in "12")
        self.backbone = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).model
        self.head = torch.nn.Linear(64, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        for model in (self.policy, self.reference, self.backbone):
            model.eval()
        self.valued = [*self.backbone.parameters(), *self.head.parameters()]
        make = torch.optim.AdamW
        self.policy_adamw = make(self.policy.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)
        self.critic_adamw = make(self.valued, lr=CRITIC_LR, betas=(0.9, 0.95), eps=EPS, weight_decay=0.0)

    def values(self, ids: Tensor) -> Tensor:
        hidden = self.backbone(ids[None], use_cache=False).last_hidden_state[0, :-1]
        values: Tensor = self.head(hidden)[:, 0]  # (T - 1,)
        return values

    def logits(self, model: torch.nn.Module, ids: Tensor) -> Tensor:
        logits: Tensor = model(ids[None]).logits[0, :-1] / TEMPERATURE
        return logits.log_softmax(-1)  # (T - 1, vocab)

    @torch.no_grad()
    def credit(self, batch_part: BatchPart) -> list[tuple[Tensor, Tensor]]:
        """(advantages not yet normalised, returns) on the generated tokens of each sample."""
        found = []
        for (ids, mask, behavior, starts), row in zip(samples(batch_part), batch_part.rows, strict=True):
            where = mask.nonzero()[:, 0].tolist()
            reference = self.logits(self.reference, ids).gather(1, ids[1:, None])[:, 0]
            values = self.values(ids)
            advantages = torch.zeros(len(where))
            returns = torch.zeros(len(where))
            ahead = {LAM: 0.0, CRITIC_LAM: 0.0}
            next_value = 0.0

            for k in reversed(range(len(where))):
                t = where[k]
                reward = -BETA * float(behavior[t] - reference[t - 1])
                ends_turn = k == len(where) - 1 or where[k + 1] != t + 1
                if ends_turn:
                    reward += row.turn_rewards[max(i for i, start in enumerate(starts) if start <= t)]

                delta = reward + next_value - float(values[t - 1])
                ahead = {lam: delta + lam * after for lam, after in ahead.items()}
                next_value = float(values[t - 1])
                advantages[k] = ahead[LAM]
                returns[k] = ahead[CRITIC_LAM] + next_value
            found.append((advantages, returns))
        return found

    def train(self, batch_part: BatchPart) -> tuple[float, float]:
        """One step; (policy's objective, critic's loss), means over tokens."""
        credit = self.credit(batch_part)
        every = torch.cat([advantages for advantages, _ in credit]).double()
        policy_loss = torch.zeros(())
        objective = torch.zeros(())
        critic_loss = torch.zeros(())

        for (ids, mask, behavior, _), (advantages, returns) in zip(samples(batch_part), credit, strict=True):
            normalised = ((advantages - every.mean()) / every.std(correction=0)).float()
            logits = self.logits(self.policy, ids)
            own = mask[1:]
            ratio = (logits.gather(1, ids[1:, None])[:, 0] - behavior[1:])[own].exp()
            entropy = -(logits.exp() * logits).sum(-1)[own]
            clipped = torch.minimum(ratio * normalised, ratio.clamp(0.8, 1.2) * normalised)
            policy_loss = policy_loss - (clipped + ENTROPY * entropy).mean() / len(credit)
            objective -= (clipped + ENTROPY * entropy).sum().detach() / batch_part.loss_tokens
            critic_loss = critic_loss + ((self.values(ids)[own] - returns) ** 2).sum() / 2 / batch_part.loss_tokens

        for loss, parameters, adamw in (
            (policy_loss, list(self.policy.parameters()), self.policy_adamw),
            (critic_loss, self.valued, self.critic_adamw),
        ):
            adamw.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            adamw.step()
        return objective.item(), critic_loss.item()


def config() -> Config:
    return load_config(None, list(SETTINGS))


def test_three_steps_equal_the_plain_loop(folder: Path) -> None:
    trainer = Trainer(config(), folder, last_step=3)
    plain = PlainPPO(folder)
    for step in range(3):
        batch_part = two_turn_batch_part(step)
        stats = UpdateStats()
        for minibatch in trainer.minibatches(batch_part):
            stats.add(trainer.update(minibatch, step))
        objective, critic_loss = plain.train(batch_part)
        values = stats.metrics()
        assert values["loss/objective"] == pytest.approx(objective, rel=1e-4, abs=1e-5)
        assert values["critic/loss"] == pytest.approx(critic_loss, rel=1e-4)

    assert trainer.critic is not None
    for mine, theirs in (
        (trainer.policy.model.named_parameters(), plain.policy.named_parameters()),
        (trainer.critic.model.named_parameters(), plain.backbone.named_parameters()),
        (trainer.critic.head.named_parameters(), plain.head.named_parameters()),
    ):
        for (name, parameter), (_, expected) in zip(mine, theirs, strict=True):
            torch.testing.assert_close(parameter, expected, rtol=0, atol=2e-5, msg=name)


def test_the_policy_waits_for_the_critic(folder: Path) -> None:
    """Nothing but the critic moves in the first batches; then the warm-up begins."""
    settings = config().model_copy(deep=True)
    assert settings.algo.critic is not None
    settings.algo.critic.pretrain_steps = 2
    settings.algo.critic.epochs = 3
    trainer = Trainer(settings, folder, last_step=4)
    assert trainer.critic is not None
    start = [parameter.clone() for parameter in trainer.policy.parameters()]
    errors = []

    for step in range(3):
        (minibatch,) = trainer.minibatches(two_turn_batch_part(0))
        stats = trainer.update(minibatch, step)
        still = all(torch.equal(a, b) for a, b in zip(start, trainer.policy.parameters(), strict=True))
        assert still == (step < 2) and stats.steps["train/lr"] == [0.0 if step < 2 else LR]
        assert len(stats.steps["critic/grad_norm"]) == 3
        errors.append(stats.metrics()["critic/loss"])
    assert errors[2] < errors[0]

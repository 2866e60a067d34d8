"""Warm start: demonstrations become the very ids of an episode, mistakes are shown and not imitated, the loss falls."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import launch.warm_start.imitation
from launch.warm_start.imitation import demonstrations, encode, fingerprint, warm_started
from launch.warm_start.sft import (
    IGNORED,
    IMITATED,
    READ,
    SHOWN,
    Example,
    SupervisedOptions,
    pack_rows,
    split_examples,
    supervised_loss,
    train_supervised,
)
from rl.config.schema import Config, ConfigError, load_config
from rl.models.stock import load_stock
from rollout.episodes.conversation import Conversation
from rollout.episodes.environment import ChatMessage, DemonstratedTurn, Demonstration
from rollout.episodes.tokenizer import ChatTokenizer

PLACES = [f"cabinet {number}" for number in range(1, 9)]
OVERRIDES = (
    "env.name=alfworld",
    "env.max_turns=6",
    "sampling.max_tokens=16",
    "generator.max_model_len=256",
    "model.tiny={hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, ffn_size: 64}",
    "model.warm_start={demonstrations: 40, steps: 120, batch: 8}",
)


def config(*overrides: str) -> Config:
    return load_config(None, [*OVERRIDES, *overrides])


def episode(rng: random.Random) -> Demonstration:
    """Go to the place that the text names; on the way once to a wrong one."""
    place, wrong = rng.sample(PLACES, 2)
    answer = [ChatMessage("user", "Nothing happens.")]
    turns = [DemonstratedTurn(f"go to {wrong}", False, answer), DemonstratedTurn(f"go to {place}", True, answer)]
    return Demonstration([ChatMessage("user", f"You see a {place}.\n\nYour task is to: go there.")], turns)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[Demonstration]:
    rng = random.Random(0)
    episodes = [episode(rng) for _ in range(40)]
    monkeypatch.setattr(launch.warm_start.imitation, "demonstrations", lambda config: episodes)
    return episodes


@pytest.fixture
def folder(played: list[Demonstration], tmp_path: Path) -> Path:
    return warm_started(config(), None, tmp_path, log=lambda line: None)


def test_a_name_with_its_number_is_one_token_and_nothing_is_lost(folder: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    for text in ("go to cabinet 3", "You see a cabinet 8.\n\nYour task is to: go there.", "no such piece 12345 é"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("go to cabinet 3")) == 3


def test_ids_are_those_of_an_episode_and_mistakes_do_not_count(folder: Path, played: list[Demonstration]) -> None:
    tokenizer = ChatTokenizer(folder)
    example = encode(tokenizer, played[0], 256)
    assert example is not None and example.mask is not None
    opening = Conversation(tokenizer, played[0].opening)
    assert list(example.prompt) == opening.context().tolist()

    imitated, shown, read = (
        [id for id, mark in zip(example.completion, example.mask, strict=True) if mark == wanted]
        for wanted in (IMITATED, SHOWN, READ)
    )

    assert tokenizer.decode(imitated) == played[0].turns[1].action and imitated[-1] == tokenizer.turn_end
    assert tokenizer.decode(shown) == played[0].turns[0].action
    assert played[0].turns[0].answer[0].content in tokenizer.decode(read)
    assert encode(tokenizer, played[0], len(example) - 1) is None  # would not fit into the context


def test_masked_tokens_have_no_part_in_the_loss(folder: Path) -> None:
    masked = Example([5, 6], [7, 8, 9], [SHOWN, IMITATED, IMITATED])
    plain = Example([5, 6, 7], [8, 9])
    rows = pack_rows([masked], width=8)
    assert rows.targets[0, :5].tolist() == [IGNORED, IGNORED, 8, 9, IGNORED]
    assert (rows.read == IGNORED).all()
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        losses = [supervised_loss(model, pack_rows([example], width=8)).item() for example in (masked, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_what_is_read_counts_by_its_weight(folder: Path) -> None:
    both = Example([5, 6], [7, 8, 9], [READ, IMITATED, SHOWN])
    model = AutoModelForCausalLM.from_pretrained(folder)

    def loss(completion: list[int], mask: list[int]) -> float:
        rows = pack_rows([Example([5, 6], completion, mask)], width=8)
        with torch.no_grad():
            return supervised_loss(model, rows).item()

    read = loss([7], [IMITATED])
    written = loss([7, 8], [SHOWN, IMITATED])
    for weight in (0.0, 0.5):
        with torch.no_grad():
            value = supervised_loss(model, pack_rows([both], width=8), weight).item()
        assert value == pytest.approx(written + weight * read, rel=1e-6)


def test_one_row_attended_in_packs_costs_the_same_loss(folder: Path) -> None:
    examples = [Example([5, 6], [7, 8, 9, 10]), Example([7], [8, 5], [READ, IMITATED]), Example([9, 9, 6], [5])]
    padded = AutoModelForCausalLM.from_pretrained(folder)
    packed = load_stock(folder, packed=True)
    losses = [supervised_loss(model, pack_rows(examples, width), 0.5) for model, width in ((padded, 8), (packed, None))]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)


def test_parts_of_a_batch_add_up_to_the_same_training(folder: Path) -> None:
    batch = [Example([5, 6], [7, 8, 9, 10]), Example([7], [8, 5], [READ, IMITATED]), Example([9, 9, 6], [5])]
    assert [sorted(map(len, part)) for part in split_examples(batch, 2)] == [[6], [3, 4]]
    assert [len(part) for part in split_examples(batch[:1], 2)] == [1]

    def trained(parts: int) -> tuple[list[float], torch.Tensor]:
        model = load_stock(folder, packed=True)
        losses: list[float] = []
        options = SupervisedOptions(6, lr=1e-3, warmup_steps=1, width=None, read_weight=0.5, parts=parts)
        train_supervised(model, lambda step: batch, options, lambda step, loss: losses.append(loss))
        return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    losses, weights = trained(1)
    split, split_weights = trained(2)
    again, again_weights = trained(2)
    assert split == pytest.approx(losses, rel=1e-5) and losses[-1] < losses[0]
    # AdamW divides tiny gradients by their own size, so that their last bits show in the weights.
    assert (split_weights - weights).abs().max() < 2e-4 and (split_weights - weights).abs().mean() < 1e-6
    assert split == again and torch.equal(split_weights, again_weights)


def test_the_loss_falls_on_episodes_that_were_not_shown(folder: Path, tmp_path: Path) -> None:
    tokenizer = ChatTokenizer(folder)
    rng = random.Random(1)
    new = [encode(tokenizer, episode(rng), 256) for _ in range(50)]
    rows = pack_rows([each for each in new if each is not None], width=256)
    trained = AutoModelForCausalLM.from_pretrained(folder)
    untrained = AutoModelForCausalLM.from_config(trained.config)
    with torch.no_grad():
        before, after = (supervised_loss(model, rows).item() for model in (untrained, trained))
    assert before > 4 and after < 1  # nats per token; a guess among the eight places alone costs 0.5


def test_it_is_made_once_and_again_when_something_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(config: Config) -> list[Demonstration]:
        raise AssertionError("made again")

    monkeypatch.setattr(launch.warm_start.imitation, "demonstrations", never)
    assert warm_started(config(), None, folder.parent) == folder
    same = fingerprint(config(), None)
    for change in ("env.max_turns=7", "model.warm_start.seed=1", "env.options={x: 1}", "model.tiny.layers=3"):
        assert fingerprint(config(change), None) != same
    assert fingerprint(config("learner.lr=1e-3", "steps=7"), None) == same


def test_any_model_can_be_the_beginning(folder: Path, tmp_path: Path, played: list[Demonstration]) -> None:
    again = warm_started(config("model.warm_start.steps=5"), folder, tmp_path / "second", log=lambda line: None)
    assert again != folder and (again / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    first, second = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, again))
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first)


def test_an_environment_without_a_demonstrator_is_one_line() -> None:
    with pytest.raises(ConfigError, match="has no demonstrator"):
        demonstrations(config("env.name=synthetic", "env.options={}"))

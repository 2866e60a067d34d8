"""The tiny model's folder: tokenizer, chat template, warm start, cache. And supervised training in general."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from envs.math import arithmetic
from experiments.sampling import accuracy, sample
from launch.warm_start.sft import IGNORED, Example, SupervisedOptions, pack_rows, supervised_loss, train_supervised
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model, prompt_ids
from launch.warm_start.word_tokenizer import TURN_END, build_tokenizer
from rollout.episodes.tokenizer import ChatTokenizer

SMALL = TinyRecipe(hidden_size=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn_size=48, sft_steps=5, sft_batch=16)
EXAMPLES = [Example([5, 6, 7, 8], [9, 10]), Example([11], [12, 13, 14]), Example([15, 16], [17])]


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_tiny_model(SMALL, tmp_path_factory.mktemp("cache"), log=lambda line: None)


def test_transformers_loads_the_folder(folder: Path) -> None:
    model = load(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"] and config["tie_word_embeddings"] is False
    assert model.get_input_embeddings().weight.data_ptr() != model.get_output_embeddings().weight.data_ptr()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token == TURN_END and len(tokenizer) == model.config.vocab_size
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id


def test_default_size_is_one_to_three_million() -> None:
    recipe = TinyRecipe()
    vocabulary = build_tokenizer(arithmetic.texts()).get_vocab_size()
    attention = 2 * recipe.hidden_size * recipe.head_dim * (recipe.heads + recipe.kv_heads)
    layer = attention + 3 * recipe.hidden_size * recipe.ffn_size
    assert 1e6 <= recipe.layers * layer + 2 * vocabulary * recipe.hidden_size <= 3e6


def test_both_tokenizers_round_trip_everything(folder: Path) -> None:
    slow_path: Any = AutoTokenizer.from_pretrained(folder)
    ours = ChatTokenizer(folder)
    words = Tokenizer.from_file(str(folder / "tokenizer.json"))
    alphabet = {index for token, index in words.get_vocab().items() if len(token) == 1 and not token.isdigit()}

    for index in range(1000):
        problem = arithmetic.problem("eval" if index % 2 else "train", index)
        for text in (problem.question, arithmetic.solution(problem)):
            ids = words.encode(text).ids
            assert slow_path(text)["input_ids"] == ids
            assert ours.decode(ids) == slow_path.decode(ids) == text
            punctuation = set(words.encode(".?,;+-*=}").ids)
            assert not (set(ids) & alphabet) - punctuation  # whole words and numbers, never bytes

        messages = [{"role": "user", "content": problem.question}]
        template = slow_path.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert prompt_ids(ours, problem) == template
        assert len(template) <= 48 and len(words.encode(arithmetic.solution(problem)).ids) <= 16


@pytest.mark.parametrize(
    "text", ["Wörter, die keiner kennt: 12345 \\frac{1}{2}\n\n\t end ", "  日本 \\boxed{7}", "a1 b 2c"]
)
def test_unknown_text_round_trips_as_bytes(folder: Path, text: str) -> None:
    assert ChatTokenizer(folder).decode(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids) == text


def test_a_second_call_makes_nothing_and_changes_nothing(folder: Path) -> None:
    before = (folder / "model.safetensors").stat().st_mtime_ns
    lines: list[str] = []
    assert ensure_tiny_model(SMALL, folder.parent, lines.append) == folder
    assert not lines, "a maker says what it does"
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert not [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]  # no drafts left


def test_the_same_recipe_makes_the_same_weights(folder: Path, tmp_path: Path) -> None:
    again = ensure_tiny_model(SMALL, tmp_path, log=lambda line: None)
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


def test_of_two_makers_one_waits_for_the_other(tmp_path: Path) -> None:
    recipe = SMALL.model_copy(update={"sft_steps": 0})
    lines: list[str] = []
    with ThreadPoolExecutor(2) as pool:  # the lock excludes open files, so threads are like processes to it
        folders = list(pool.map(lambda _: ensure_tiny_model(recipe, tmp_path, lines.append), range(2)))
    assert folders[0] == folders[1] and len(lines) == 1
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folders[0]]


@pytest.mark.parametrize("field", list(TinyRecipe.model_fields))
def test_the_fingerprint_changes_with_every_field(field: str) -> None:
    value = getattr(SMALL, field)
    changed = SMALL.model_copy(update={field: value + 1})
    assert changed.fingerprint() != SMALL.fingerprint() == SMALL.model_copy().fingerprint()


def test_accuracy_of_an_untrained_model_is_nearly_zero(folder: Path) -> None:
    assert accuracy(folder, tasks=32, temperature=1.0) < 0.1


def test_packing_equals_one_example_at_a_time(folder: Path) -> None:
    model = load(folder).requires_grad_(False)
    rows = pack_rows(EXAMPLES, width=8)
    assert rows.token_ids.shape == (2, 8) and int((rows.targets != IGNORED).sum()) == 6
    alone = [model(torch.tensor([[*e.prompt, *e.completion]])).logits.log_softmax(-1)[0] for e in EXAMPLES]
    total = sum(
        float(logp[len(e.prompt) - 1 + place, token])
        for e, logp in zip(EXAMPLES, alone, strict=True)
        for place, token in enumerate(e.completion)
    )
    assert supervised_loss(model, rows).item() == pytest.approx(-total / 6, abs=1e-5)


def test_the_loss_looks_at_completions_only(folder: Path) -> None:
    model = load(folder)
    supervised_loss(model, pack_rows(EXAMPLES[:1], width=16)).backward()
    gradient = model.get_output_embeddings().weight.grad.sum(1)  # (vocabulary,): p - 1 at targets, p elsewhere
    assert int((gradient.abs() > 0).sum()) > 0
    rows = pack_rows(EXAMPLES[:1], width=16)
    assert rows.targets[0, :6].tolist() == [IGNORED, IGNORED, IGNORED, 9, 10, IGNORED]


def test_a_long_example_gets_a_row_of_its_length() -> None:
    assert pack_rows([Example(range(20), [1])], width=8).token_ids.shape == (1, 21)


def test_supervised_training_learns_the_completions(folder: Path) -> None:
    model = load(folder)
    losses: list[float] = []
    options = SupervisedOptions(steps=40, lr=1e-2, warmup_steps=5, width=16)
    train_supervised(model, lambda step: EXAMPLES, options, lambda step, loss: losses.append(loss))
    assert losses[-1] < 0.05 < losses[0]
    for example in EXAMPLES:
        [answer] = sample(
            model, [list(example.prompt)], seeds=[0], stop_ids=[], max_tokens=len(example.completion), temperature=0
        )
        assert answer.token_ids == list(example.completion)


def test_samples_depend_on_their_own_prompt_and_seed(folder: Path) -> None:
    model = load(folder)
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    together = sample(model, prompts, seeds=[1, 2, 3], stop_ids=[20], max_tokens=6)
    for prompt, seed, expected in zip(prompts, [1, 2, 3], together, strict=True):
        [alone] = sample(model, [prompt], seeds=[seed], stop_ids=[20], max_tokens=6)
        assert alone.token_ids == expected.token_ids
        assert alone.logp == pytest.approx(expected.logp, abs=1e-4)
        ids = torch.tensor([[*prompt, *expected.token_ids]])
        logp = model(ids).logits.log_softmax(-1)[0, len(prompt) - 1 : -1]
        assert expected.logp == pytest.approx(logp[range(len(expected.logp)), expected.token_ids].tolist(), abs=1e-4)

"""The tiny model: a Qwen3 of one to three million parameters that a laptop warm-starts in about a minute.

`ensure_tiny_model(recipe)` returns a folder that transformers and vLLM load like one from a hub. It is made once
and kept under the hash of the recipe and of the sources that make it. The warm start imitates the demonstrator of
`envs/math/arithmetic.py` on training problems only: it knows the task, and is right about one time in three.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

import launch.warm_start.sft
from envs.math import arithmetic
from launch.warm_start.sft import Example, SupervisedOptions, progress_report, train_supervised
from launch.warm_start.word_tokenizer import PADDING, SOURCES, TURN_END, build_tokenizer, save_tokenizer
from rl.store.made_once import cache_folder, digest, made_once, to_stderr
from rollout.episodes.environment import ChatMessage
from rollout.episodes.tokenizer import ChatTokenizer

_SOURCES = (arithmetic.__file__, launch.warm_start.sft.__file__, *SOURCES, __file__)


class TinyRecipe(BaseModel):
    """Everything that the folder's content depends on, besides the sources."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    hidden_size: int = Field(192, ge=8)
    layers: int = Field(2, ge=1)
    heads: int = Field(6, ge=1)
    kv_heads: int = Field(2, ge=1)
    head_dim: int = Field(32, ge=8)
    ffn_size: int = Field(640, ge=8)
    max_length: int = Field(512, ge=64)
    """Longest context, in tokens."""
    seed: int = 0
    """The seed of the initial weights and of the demonstrations."""
    sft_steps: int = Field(500, ge=0)
    sft_batch: int = Field(64, ge=1)
    """Demonstrations of one step."""
    sft_lr: float = Field(3e-3, gt=0)
    sft_warmup_steps: int = Field(20, ge=1)
    hasty: float = Field(0.65, ge=0, le=1)
    """Share of demonstrations that answer after the first step; see `arithmetic.Student`."""
    slip: float = Field(0.13, ge=0, le=1)
    """Share of demonstrations with a wrong operation."""

    def fingerprint(self) -> str:
        """16 hex digits that change with any field and with the sources that make the folder."""
        return digest(self.model_dump_json(), *_SOURCES)


def ensure_tiny_model(recipe: TinyRecipe, cache: Path | None = None, log: Callable[[str], None] = to_stderr) -> Path:
    """The model's folder; made first if it is not there, by one process while others wait."""
    folder = (cache or cache_folder()) / f"tiny-{recipe.fingerprint()}"
    return made_once(folder, lambda draft: _make(recipe, draft, log))


def prompt_ids(tokenizer: ChatTokenizer, problem: arithmetic.ArithmeticProblem) -> list[int]:
    """The prompt exactly as an episode of the math environment opens it."""
    return tokenizer.prompt([ChatMessage("user", problem.question)])


def _make(recipe: TinyRecipe, folder: Path, log: Callable[[str], None]) -> None:
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tokenizer = build_tokenizer(arithmetic.texts())
    folder.mkdir()
    save_tokenizer(tokenizer, folder, recipe.max_length)
    model = new_model(recipe, tokenizer)
    model.save_pretrained(folder)  # ChatTokenizer reads the end of a turn from it
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log(f"tiny model: {parameters / 1e6:.2f}M parameters, warm start of {recipe.sft_steps} steps")

    options = SupervisedOptions(recipe.sft_steps, recipe.sft_lr, recipe.sft_warmup_steps)
    examples = _demonstrations(recipe, folder, tokenizer)
    train_supervised(model, examples, options, progress_report(log, recipe.sft_steps, every=100))
    model.save_pretrained(folder)


def new_model(recipe: TinyRecipe, tokenizer: Tokenizer) -> Any:
    """A Qwen3 of the recipe's shape for this tokenizer, with random weights."""
    # Imported here: a cached model costs no import of seconds.
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    vocabulary = tokenizer.get_vocab()
    end = vocabulary[TURN_END]
    padding = vocabulary[PADDING]
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.ffn_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        head_dim=recipe.head_dim,
        max_position_embeddings=recipe.max_length,
        tie_word_embeddings=False,  # a tied head goes stale in vLLM on CPU when weights are updated
        eos_token_id=end,
        pad_token_id=padding,
        dtype="float32",
    )

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model: Any = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=[end, padding], pad_token_id=padding, do_sample=True)
    return model


def _demonstrations(recipe: TinyRecipe, folder: Path, words: Tokenizer) -> Callable[[int], list[Example]]:
    tokenizer = ChatTokenizer(folder)
    end = words.get_vocab()[TURN_END]
    student = arithmetic.Student(recipe.hasty, recipe.slip)

    def next_examples(step: int) -> list[Example]:
        examples = []
        for index in range(step * recipe.sft_batch, (step + 1) * recipe.sft_batch):
            problem = arithmetic.problem("train", index, recipe.seed)
            rng = random.Random(recipe.seed << 40 | index)
            answer = arithmetic.demonstrate(problem, rng, student)
            examples.append(Example(prompt_ids(tokenizer, problem), [*words.encode(answer).ids, end]))
        return examples

    return next_examples

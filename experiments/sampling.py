"""Batched sampling from a transformers model in this process: for references and small evaluations, not for speed.

python -m experiments.sampling [field=value ...]     makes a tiny model; prints its folder and held-out accuracy
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from envs.math import arithmetic
from envs.math.answers import last_box
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model, prompt_ids
from rollout.episodes.tokenizer import ChatTokenizer


@dataclass(frozen=True)
class Sampled:
    """One completion; `logp` are of the distribution sampled from (after the temperature)."""

    token_ids: list[int]  # ends with a stop id unless cut at max_tokens
    logp: list[float]


@torch.no_grad()
def sample(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int],
    stop_ids: Sequence[int],
    max_tokens: int,
    temperature: float = 1.0,
) -> list[Sampled]:
    """Complete all prompts together; seeds[i] alone decides the draws of prompts[i].

    Temperature 0 is greedy (its log-probabilities are at temperature 1).
    """
    device = next(model.parameters()).device
    token_ids, attention = (tensor.to(device) for tensor in _pad_left(prompts, max_tokens))
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    draws = np.stack([np.random.default_rng(seed).random(max_tokens, np.float32) for seed in seeds])
    uniform = torch.from_numpy(draws).to(device).T.contiguous()  # (max_tokens, prompts)
    stops = torch.tensor(list(stop_ids), device=device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    steps: list[tuple[Tensor, Tensor, Tensor]] = []  # token, its log-probability, whether it counts; (prompts,) each
    cache = None
    cached = 0  # columns in the cache

    with _padded_attention(model):
        for step in range(max_tokens):
            column = cached + token_ids.shape[1]
            output = model(
                token_ids,
                attention_mask=attention[:, :column],
                position_ids=positions[:, cached:column],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )

            cache = output.past_key_values
            cached = column

            logits = output.logits[:, -1].float() / (temperature or 1.0)  # (prompts, vocabulary)
            logp = logits.log_softmax(-1)
            token_ids = _draw(logp, uniform[step, :, None]) if temperature else logits.argmax(-1, keepdim=True)
            steps.append((token_ids[:, 0], logp.gather(1, token_ids)[:, 0], running))
            running = running & ~torch.isin(token_ids[:, 0], stops)
            if not running.any():
                break

    chosen, chosen_logp, counted = (torch.stack(column, 1) for column in zip(*steps, strict=True))
    columns = zip(chosen.tolist(), chosen_logp.tolist(), counted.sum(1).tolist(), strict=True)
    return [Sampled(ids[:length], logp[:length]) for ids, logp, length in columns]


@contextlib.contextmanager
def _padded_attention(model: Any) -> Iterator[None]:
    """While this is entered, a model that reads packs takes rows with padding, a mask and a cache."""
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def _pad_left(prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[Tensor, Tensor]:
    """(prompts, longest) ids and (prompts, longest + max_tokens) attention: all rows grow at the same column."""
    longest = max(map(len, prompts))
    token_ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    attention = [[0] * (longest - len(prompt)) + [1] * (len(prompt) + max_tokens) for prompt in prompts]
    return token_ids, torch.tensor(attention)


def _draw(logp: Tensor, uniform: Tensor) -> Tensor:
    """(prompts, 1) ids by inverting the cumulative distribution, which float rounding may leave just below 1."""
    return torch.searchsorted(logp.exp().cumsum(-1), uniform).clamp(max=logp.shape[-1] - 1)


def accuracy(folder: Path, tasks: int, temperature: float, seed: int = 0) -> float:
    """Share of held-out problems that the model in `folder` answers right, one sample each."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = ChatTokenizer(folder)
    problems = [arithmetic.problem("eval", index, seed) for index in range(tasks)]
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    seeds = range(seed, seed + tasks)
    stop_ids = tokenizer.stop_ids
    answers = sample(model, prompts, seeds=seeds, stop_ids=stop_ids, max_tokens=32, temperature=temperature)

    right = [
        last_box(tokenizer.decode(answer.token_ids)) == problem.answer
        for answer, problem in zip(answers, problems, strict=True)
    ]
    return sum(right) / tasks


def main(arguments: list[str]) -> None:
    """Make the model of the recipe and print where it is and what it can."""
    fields = dict(argument.partition("=")[::2] for argument in arguments)
    folder = ensure_tiny_model(TinyRecipe.model_validate(fields))
    print(folder)
    for temperature in (0.0, 1.0):
        print(f"held-out accuracy at temperature {temperature:g}: {accuracy(folder, 512, temperature):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])

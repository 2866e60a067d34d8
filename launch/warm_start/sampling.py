"""Batched sampling from a transformers model in this process: for references and small evaluations, not for speed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


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
    with _padded_attention(model):
        return _sample(model, prompts, seeds, stop_ids, max_tokens, temperature)


@contextlib.contextmanager
def _padded_attention(model: Any) -> Iterator[None]:
    """A learner's model may attend in packs only (`packed_attention.py`); here rows are padded and cached."""
    own = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(own)


def _sample(
    model: Any, prompts: Sequence[Sequence[int]], seeds: Sequence[int], stop_ids: Sequence[int], max_tokens: int,
    temperature: float,
) -> list[Sampled]:  # fmt: skip
    device = next(model.parameters()).device
    longest = max(map(len, prompts))
    token_ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
    attention = torch.zeros(len(prompts), longest + max_tokens, dtype=torch.int64)
    for row, prompt in enumerate(prompts):  # padded on the left, so that all rows grow at the same column
        token_ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        attention[row, longest - len(prompt) :] = 1
    token_ids, attention = token_ids.to(device), attention.to(device)
    positions = (attention.cumsum(1) - 1).clamp(min=0)
    draws = np.stack([np.random.default_rng(seed).random(max_tokens, np.float32) for seed in seeds])
    uniform = torch.from_numpy(draws).to(device).T.contiguous()  # (max_tokens, prompts)
    stops = torch.tensor(list(stop_ids), device=device)
    running = torch.ones(len(prompts), dtype=torch.bool, device=device)
    chosen, chosen_logp, alive, cache = [], [], [], None
    for column in range(longest, longest + max_tokens):
        done = column - token_ids.shape[1]  # columns already in the cache
        output = model(
            token_ids,
            attention_mask=attention[:, :column],
            position_ids=positions[:, done:column],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        cache = output.past_key_values
        logits = output.logits[:, -1].float() / (temperature or 1.0)  # (prompts, vocabulary)
        logp = logits.log_softmax(-1)
        if temperature == 0:
            picked = logits.argmax(-1, keepdim=True)
        else:
            # By inverting the cumulative distribution, which float rounding may leave just below 1.
            picked = torch.searchsorted(logp.exp().cumsum(-1), uniform[column - longest, :, None])
            picked = picked.clamp(max=logits.shape[-1] - 1)
        chosen.append(picked[:, 0])
        chosen_logp.append(logp.gather(1, picked)[:, 0])
        alive.append(running)
        running = running & ~torch.isin(picked[:, 0], stops)
        token_ids = picked
        if not running.any():
            break
    lengths = torch.stack(alive).sum(0).tolist()
    all_ids, all_logp = torch.stack(chosen, 1).tolist(), torch.stack(chosen_logp, 1).tolist()
    return [
        Sampled(ids[:length], logps[:length]) for ids, logps, length in zip(all_ids, all_logp, lengths, strict=True)
    ]

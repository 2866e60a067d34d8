"""Tiny Qwen3 models and batches for tests of the learner's numerics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from algos.registry import Loss, LossFunction, make_loss
from experiments.columns import token_columns
from rl.config.schema import load_config
from rl.learner.algorithm import Algorithm, make_algorithm
from rl.learner.credit import assign
from rl.learner.update import UpdateStats, accumulate_gradients
from rl.models.packing import Pack, dummy_pack, make_packs
from rl.models.policy import Policy
from rl.wire.messages import BatchPart, SampleRow

VOCAB = 67  # odd: two ranks hold a different number of rows


def save_tiny(folder: Path, *, tied: bool = True) -> Path:
    """Initial weights large enough that attention matters: a packing fault moves logprobs by tenths of a nat."""
    torch.manual_seed(0)

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        tie_word_embeddings=tied,
        initializer_range=0.15,
        max_position_embeddings=512,
        attention_dropout=0.1,
    )

    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_batch_parts(ranks: int, *, groups: int = 3, group_size: int = 2, seed: int = 0) -> list[BatchPart]:
    """The same batch for any number of ranks; the first rank gets the samples 0, ranks, 2 ranks, ..."""
    random = np.random.default_rng(seed)
    samples = []
    rows = []
    for i in range(groups * group_size):
        lengths = random.integers(1, 12, size=4)  # prompt, answer, observation, answer
        mask = np.repeat(np.array([0, 1, 0, 1], np.uint8), lengths)
        tokens = len(mask)

        samples.append(
            token_columns(
                random.integers(0, VOCAB, tokens),
                mask,
                logp_behavior=random.uniform(-6, -2, tokens),
                policy_version=random.integers(3, 6, tokens),
            )
        )
        rows.append(SampleRow(i, i // group_size, float(random.normal()), tokens, int(mask.sum()), 3))
    batch_parts = []

    for rank in range(ranks):
        members = list(range(rank, len(rows), ranks))
        columns = {name: np.concatenate([samples[i][name] for i in members]) for name in samples[0]}

        batch_parts.append(
            BatchPart(
                step=5,
                rank=rank,
                timeline=0,
                rows=rows,
                members=members,
                lengths=[rows[i].tokens for i in members],
                turn_starts=[[0] for _ in members],
                columns=columns,
                loss_tokens=sum(row.loss_tokens for row in rows),
            )
        )

    return batch_parts


def group_batch_part(groups: list[tuple[int, list[int]]], seed: int = 0) -> BatchPart:
    """Groups as (tokens of the prompt, tokens of its answers), of random ids; their samples in a mixed order."""
    random = np.random.default_rng(seed)
    samples = []
    rows: list[SampleRow] = []
    starts = []
    for group, (prompt, answers) in enumerate(groups):
        asked = random.integers(0, VOCAB, prompt)
        for answer in answers:
            ids = np.concatenate([asked, random.integers(0, VOCAB, answer)])
            mask = np.repeat(np.array([0, 1], np.uint8), [prompt, answer])
            samples.append(token_columns(ids, mask, logp_behavior=-1.0, policy_version=3))
            rows.append(SampleRow(len(rows), group, float(random.normal()), len(ids), answer, 3))
            starts.append([prompt])

    members = random.permutation(len(rows)).tolist()
    return BatchPart(
        step=5,
        rank=0,
        timeline=0,
        rows=rows,
        members=members,
        lengths=[rows[i].tokens for i in members],
        turn_starts=[starts[i] for i in members],
        columns={name: np.concatenate([samples[i][name] for i in members]) for name in samples[0]},
        loss_tokens=sum(row.loss_tokens for row in rows),
    )


def packs_of(batch_part: BatchPart, max_tokens: int = 64) -> list[Pack]:
    """With group advantages; of one minibatch, or of the part that `batch_part` is."""
    packs = make_packs(batch_part, max_tokens, version=5) or [dummy_pack()]
    return assign(batch_part, [packs], make_algorithm(load_config(None)))[0].packs


def everywhere(pack: Pack) -> Pack:
    """All of its tokens count as generated."""
    return pack.with_columns(loss_mask=torch.ones_like(pack.mask))


def gradients(policy: Policy) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, parameter in policy.model.named_parameters():
        grad = parameter.grad
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
    return found


def backward(
    policy: Policy,
    packs: list[Pack],
    tokens: int,
    *,
    loss: str | LossFunction = "grpo",
    options: dict[str, Any] | None = None,
    world_size: int = 1,
    first_step: bool = False,
) -> tuple[dict[str, Tensor], UpdateStats]:
    """Fresh gradients and statistics of these packs."""
    policy.zero_grad(set_to_none=True)
    algorithm = algorithm_of(make_loss(loss, options or {}))

    stats = accumulate_gradients(
        policy,
        packs,
        algorithm,
        temperature=0.7,
        global_tokens=tokens,
        world_size=world_size,
        first_step=first_step,
    )

    return gradients(policy), stats


def algorithm_of(loss: Loss) -> Algorithm:
    """The defaults with this loss."""
    return replace(make_algorithm(load_config(None)), loss=loss)


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@contextmanager
def stock_attention(model: Any) -> Iterator[None]:
    """transformers' own attention, which needs no bounds of samples."""
    ours = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)

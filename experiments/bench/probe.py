"""How far engine and learner are apart with the same weights, and how far with wrong ones: what the probe can tell.

    python -m experiments.bench probe [--dtype bfloat16] [--probes 200] [--out FILE.json]

The engine is real vLLM; the learner is sharded over one rank, as in a run, with float32 masters. The model is that of
`math_cpu`, and a probe is as long as one of a run. It is text of the run (prompts, and answers that the model has
sampled), or ids spread over the vocabulary. Nats: |difference| of single tokens, and its mean over a probe, which
`alarms.limits.weights-differ` limits. Beside them: the least of ten probes where one matrix is that of before the warm
start, on one of the two sides.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from envs.math import arithmetic
from experiments.bench._measuring import parser_of, write
from experiments.sampling import sample
from launch.warm_start.tiny import TinyRecipe, ensure_tiny_model, prompt_ids
from rl.config.schema import load_config
from rl.learner.publish import probe_logp
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions
from rl.models.stock import load_stock
from rl.weights.updater import EXACT_PROBE_TOKENS, PROBE_TOKENS, tolerance
from rollout.episodes.tokenizer import ChatTokenizer
from rollout.generator.engines.environment import engine_environment

_RECIPE = Path(__file__).parent.parent / "math_cpu.yaml"
_WRONG_PROBES = 10
_CONTEXT = 128
_SHORTEST = 16  # tokens of a sample, fewer than any has
Probes = Sequence[list[int]]


def texts(folder: Path, count: int, length: int) -> Probes:
    """`length` ids each of what a run's batches hold, samples one after another; a run's own probe is the first."""
    tokenizer = ChatTokenizer(folder)
    samples = 1 + count * length // _SHORTEST
    problems = [arithmetic.problem("train", index, 0) for index in range(samples)]
    prompts = [prompt_ids(tokenizer, problem) for problem in problems]
    model = load_stock(folder, packed=False)
    answers = sample(model, prompts, seeds=range(len(prompts)), stop_ids=tokenizer.stop_ids, max_tokens=24)

    ids = [token for prompt, answer in zip(prompts, answers, strict=True) for token in (*prompt, *answer.token_ids)]
    return [ids[start : start + length] for start in range(0, count * length, length)]


def spread(vocabulary: int, count: int, length: int) -> Probes:
    """Ids that no text has."""
    drawn: Probes = np.random.default_rng(0).integers(0, vocabulary, (count, length)).tolist()
    return drawn


def engine_logp(folder: Path, dtype: Any, probes: Probes) -> np.ndarray:
    """(probes, length - 1) nats, of ids[1:] at temperature 1."""
    config = load_config(_RECIPE, [f"generator.dtype={str(dtype).removeprefix('torch.')}"])
    os.environ.update(engine_environment(config, "cpu"))
    from vllm import LLM, SamplingParams

    from rollout.generator.engines.cpu.unpacked import heed_environment
    from rollout.generator.engines.vllm_settings import HEAD

    heed_environment()

    engine: Any = LLM(
        model=str(folder),
        dtype=dtype,
        hf_overrides=HEAD,
        max_model_len=_CONTEXT,
        max_num_batched_tokens=8192,
        kv_cache_memory_bytes=1 << 26,
        enforce_eager=True,
        enable_chunked_prefill=False,
        skip_tokenizer_init=True,
        logprobs_mode="processed_logprobs",
    )

    asked = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": ids} for ids in probes], asked, use_tqdm=False)
    return np.array(
        [
            [scores[token].logprob for token, scores in zip(ids[1:], answer.prompt_logprobs[1:], strict=True)]
            for ids, answer in zip(probes, answers, strict=True)
        ]
    )


def learner_logp(policy: Policy, probes: Probes) -> np.ndarray:
    """(probes, length - 1) nats."""
    return np.array([probe_logp(policy, ids) for ids in probes])


def apart(engine: np.ndarray, learner: np.ndarray) -> dict[str, float]:
    """Figures of |difference|, of single tokens and of means over probes."""
    tokens = np.abs(engine - learner)
    means = tokens.mean(1)
    return {
        "token_median": float(np.median(tokens)),
        "token_p99": float(np.quantile(tokens, 0.99)),
        "token_max": float(tokens.max()),
        "probe_mean": float(means.mean()),
        "probe_p99": float(np.quantile(means, 0.99)),
        "probe_max": float(means.max()),
    }


@torch.no_grad()
def with_old_matrices(
    policy: Policy, before: Mapping[str, torch.Tensor], engine: np.ndarray, probes: Probes
) -> dict[str, float]:
    """Name of a matrix -> the least mean of a probe, where it is that of `before`."""
    found = {}
    for name, local, placement in policy.export(untie=False):
        if len(placement.shape) < 2:
            continue

        kept = local.clone()
        local.copy_(before[name])
        found[name] = float(np.abs(engine - learner_logp(policy, probes)).mean(1).min())
        local.copy_(kept)
    return found


def main(argv: list[str]) -> None:
    parser = parser_of("probe", __doc__)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--probes", type=int, default=200)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)

    folder = ensure_tiny_model(TinyRecipe())
    untrained = Policy.load(ensure_tiny_model(TinyRecipe(sft_steps=0)))
    before = {name: tensor for name, tensor, _ in untrained.export()}
    length = EXACT_PROBE_TOKENS if options.dtype == "float32" else PROBE_TOKENS
    own = texts(folder, options.probes, length)
    kinds = {"text of the run": own, "ids of no text": spread(len(before["lm_head.weight"]), options.probes, length)}

    engine = {kind: engine_logp(folder, options.dtype, probes) for kind, probes in kinds.items()}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    policy = Policy.load(folder, init_device_mesh("cpu", (1,)), options=ModelOptions(dtype))

    result: dict[str, Any] = {
        "dtype": options.dtype,
        "probes": options.probes,
        "ids": length,
        "tolerance": tolerance(load_config(None, [f"generator.dtype={options.dtype}"])),
    }
    result["equal weights"] = {
        kind: apart(engine[kind], learner_logp(policy, probes)) for kind, probes in kinds.items()
    }
    wrong = with_old_matrices(policy, before, engine["text of the run"][:_WRONG_PROBES], own[:_WRONG_PROBES])
    result["one old matrix"] = {name: round(found, 4) for name, found in sorted(wrong.items(), key=lambda one: one[1])}
    dist.destroy_process_group()

    for kind, found in result["equal weights"].items():
        print(f"{kind}: " + ", ".join(f"{name} {value:.2g}" for name, value in found.items()))
    least = next(iter(result["one old matrix"].items()))
    print(f"one old matrix: at least {least[1]:.3g} ({least[0]}); tolerance {result['tolerance']:g}")
    write(options.out, result)

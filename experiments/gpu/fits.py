"""What fits on which GPUs, by the estimate that a run is checked with: the tables of `docs/gpu.md`.

    python -m experiments.gpu.fits

Answers of 1 024 tokens in contexts of 2 048, packs of 8 192, bfloat16 with float32 master weights, recomputation.
"""

from __future__ import annotations

from pathlib import Path

from experiments.gpu.models import SIZES
from launch.gpus import Gpu
from launch.machine import GIB, Machine, gpu_bytes
from launch.memory import Need, check_memory, estimate, on_host
from rl.config.schema import ConfigError, load_config
from rl.models.shape import ModelShape

_RECIPE = Path(__file__).parents[1] / "math_1gpu.yaml"
_QWEN3 = SIZES["4b"]
MODELS = {
    "0.6B": _QWEN3
    | {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28, "intermediate_size": 3072},
    "1.7B": _QWEN3
    | {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 28, "intermediate_size": 6144},
    "4B": _QWEN3,
    "8B": _QWEN3 | {"hidden_size": 4096, "intermediate_size": 12288},
    "14B": _QWEN3
    | {"hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40, "intermediate_size": 17408},
    "32B": _QWEN3
    | {"hidden_size": 5120, "num_attention_heads": 64, "num_hidden_layers": 64, "intermediate_size": 25600},
}
"""Qwen3's."""
_TIED = ("0.6B", "1.7B", "4B")


def shape(name: str) -> ModelShape:
    return ModelShape.of(MODELS[name] | {"tie_word_embeddings": name in _TIED})


ON_HOST = ("learner.optimizer_states=host", "learner.reduce_dtype=bfloat16")
"""The settings of the second table."""
_BY_TURNS = "placement=alternate"


def shared(model: ModelShape, gib: int, *overrides: str) -> str:
    """Thousands of tokens of the cache beside a learner on one GPU, or that they do not fit."""
    machine = Machine([Gpu("0", gpu_bytes(gib))])
    needs = _needs(model, machine, *overrides)
    if not _fit(needs, machine):
        return "no"
    (engine,) = [need for need in needs if need.beside == "a learner"]
    cache = engine.parts["KV cache"] / model.kv_bytes(2)
    return f"{cache / 1000:.0f}k"


def ranks(model: ModelShape, gib: int, *overrides: str) -> str:
    """The fewest learner ranks of seven, each with a GPU of its own, that hold the model, if an engine's GPU does."""
    machine = Machine([Gpu(str(number), gpu_bytes(gib)) for number in range(8)])
    for count in range(1, 8):
        if _fit(_needs(model, machine, "placement=apart", f"learner.ranks={count}", *overrides), machine):
            return str(count)
    return "no"


def table(*overrides: str) -> str:
    lines = [
        "| model | one GPU of 24 GB | 48 GB | 80 GB | ranks of 48 GB | of 80 GB | memory of the host |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        model = shape(name)
        cells = [shared(model, gib, *overrides) for gib in (24, 48, 80)]
        cells += [ranks(model, gib, *overrides) for gib in (48, 80)]
        host = on_host(_needs(model, Machine(), *overrides)) / GIB
        lines.append(f"| {' | '.join([name, *cells, f'{host:.0f} GiB'])} |")
    return "\n".join(lines)


def turns() -> str:
    """The cache on one GPU whose engine and rank take turns, with all states on it in the learner's, and without."""
    lines = [
        "| model | one GPU of 24 GB | 48 GB | 80 GB | memory of the host | states on the host: 24 GB | 48 GB | 80 GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in MODELS:
        model = shape(name)
        own, on_the_host = (
            [shared(model, gib, _BY_TURNS, *overrides) for gib in (24, 48, 80)] for overrides in ((), ON_HOST)
        )
        host = on_host(_needs(model, Machine(), _BY_TURNS)) / GIB
        lines.append(f"| {' | '.join([name, *own, f'{host:.0f} GiB', *on_the_host])} |")
    return "\n".join(lines)


def _needs(model: ModelShape, machine: Machine, *overrides: str) -> list[Need]:
    return estimate(load_config(_RECIPE, [*overrides]), "cuda", model, machine)


def _fit(needs: list[Need], machine: Machine) -> bool:
    try:
        check_memory(needs, machine)
    except ConfigError:
        return False
    return True


if __name__ == "__main__":
    print(table(), table(*ON_HOST), turns(), sep="\n\n")

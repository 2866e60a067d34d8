"""Which models can be trained, by what `config.json` says of them. No torch: a dry run asks before it is installed.

A family is on the list because tests run it (tests/rl/models/test_families.py). Samples in packs equal samples one by
one, dropout is off, an export is the checkpoint again, and the engine's log-probabilities are the learner's. Others are
refused by name. docs/models.md says how to add one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rl.models.shape import ModelShape
from rl.wire.columns import EXPERT_COUNTS

_STATE = "its layers carry a state along a pack, from one sample into the next"
_NAMES = "transformers keeps its parameters under other names than its checkpoints, so engines could not load an export"
_LAYERS = "its decoder has no `layers` that could be sharded one by one"
CONVERTED = (
    "transformers keeps its parameters under other names and shapes than its checkpoints, so engines could not load an "
    "export"
)


@dataclass(frozen=True)
class Family:
    """What the learner has to know of a family beyond what transformers says.

    * `models`: of the hub, for example.
    * `divisor`: the setting by which it divides its logits after the head.
    * `routing`: of a mixture of experts, how a router makes weights of its logits.
    * `renamed`: parts of names, as transformers keeps them, and what the files have in their place.
    * `experts`: how the files call gate, up and down of one expert; transformers keeps those of a layer as one tensor.
    """

    models: str
    divisor: str | None = None
    routing: Literal["softmax", "sigmoid"] | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[str, str, str] | None = None


_EXPERTS = ("gate_proj", "up_proj", "down_proj")


FAMILIES = {
    "llama": Family("Llama 2 and 3, SmolLM2"),
    "qwen2": Family("Qwen 2 and 2.5"),
    "qwen3": Family("Qwen 3, dense"),
    "mistral": Family("Mistral 7B, Mistral Nemo"),
    "gemma3_text": Family("Gemma 3 1B and 270M"),
    "phi3": Family("Phi 3 and Phi 4, text"),
    "smollm3": Family("SmolLM3"),
    "olmo2": Family("OLMo 2"),
    "olmo3": Family("OLMo 3"),
    "granite": Family("Granite 3, dense", "logits_scaling"),
    "glm4": Family("GLM-4-0414"),
    "exaone4": Family("EXAONE 4"),
    "ministral": Family("Ministral"),
    "starcoder2": Family("StarCoder2"),
    "seed_oss": Family("Seed-OSS"),
    "arcee": Family("AFM 4.5B"),
    "qwen3_moe": Family("Qwen3-30B-A3B", routing="softmax", experts=_EXPERTS),
    "qwen2_moe": Family("Qwen1.5-MoE-A2.7B", routing="softmax", experts=_EXPERTS),
    "glm4_moe": Family("GLM-4.5-Air", routing="sigmoid", experts=_EXPERTS),
    "olmoe": Family("OLMoE-1B-7B", routing="softmax", experts=_EXPERTS),
    "granitemoe": Family(
        "Granite 3 MoE",
        divisor="logits_scaling",
        routing="softmax",
        renamed={
            ".experts.gate_up_proj": ".input_linear.weight",
            ".experts.down_proj": ".output_linear.weight",
            ".router.weight": ".router.layer.weight",
        },
    ),
    "mixtral": Family(
        "Mixtral 8x7B", routing="softmax", renamed={".mlp.": ".block_sparse_moe."}, experts=("w1", "w3", "w2")
    ),
}
"""The families by `model_type`."""
SERVED_MERGED = {
    name: "with adapters vLLM takes other kernels for experts" for name, each in FAMILIES.items() if each.routing
}
SERVED_MERGED["glm4"] = "vLLM takes its gate_up_proj for two layers"
"""Families whose engines cannot be sent adapters alone, and why not."""

_STATEFUL = (
    "bamba falcon_h1 falcon_mamba granitemoehybrid jamba lfm2 mamba mamba2 minimax nemotron_h qwen3_5_text qwen3_next "
    "recurrent_gemma rwkv zamba2"
)
BY_REASON = {
    "the engine's sliding windows reach one token further than those of transformers": ["cohere2"],
    "final_logit_softcapping bends its logits after the head": ["gemma2"],
    "engines keep parts made of its latent attention's weights, and no test has seen an update reach them": [
        "deepseek_v2",
        "deepseek_v3",
    ],
    "its attention has sinks, which no attention of the learner knows": ["gpt_oss"],
    "its decoder hands nothing of a pack on to its attention": ["nemotron"],
    _LAYERS: ["gpt2", "bloom"],
    _NAMES: ["gpt_neox", "opt", "gemma4_text"],
    _STATE: _STATEFUL.split(),
}
REFUSED = {name: reason for reason, names in BY_REASON.items() for name in names}
"""Families with a known fault, by `model_type`: refused with `model.untested=true` as well."""

_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
_BY_LENGTH = {"dynamic", "longrope", "su"}
_LAYER_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}


def read_config(folder: Path) -> dict[str, Any]:
    """What `config.json` says, as it was saved. Raises ValueError where it is no such file."""
    try:
        told = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"config.json in {str(folder)!r} cannot be read ({error})") from None
    if not isinstance(told, dict) or "model_type" not in told:
        raise ValueError(f"config.json in {str(folder)!r} names no model_type")
    return told


def check_family(told: Mapping[str, Any], *, untested: bool = False) -> None:
    """Raises ValueError with the reason for what cannot be trained; `untested` lets families pass that no test runs."""
    name = str(told["model_type"])
    if reason := REFUSED.get(name) or _known_fault(told):
        raise ValueError(f"{name}: {reason}")
    if name not in FAMILIES and not untested:
        raise ValueError(
            f"{name}: no test has this family, and those that are tested are {', '.join(FAMILIES)}; "
            "model.untested=true trains it all the same, and docs/models.md says how to add it"
        )


def check_team(told: Mapping[str, Any], ranks: int) -> None:
    """Raises ValueError where so many ranks cannot compute a pack of this model together."""
    shape = ModelShape.of(told)

    if shape.heads % ranks:
        raise ValueError(f"{ranks} ranks cannot share its {shape.heads} heads evenly; take a divisor of them")
    if shape.kv_heads % ranks and ranks % shape.kv_heads:
        raise ValueError(
            f"{ranks} ranks cannot share its {shape.kv_heads} key-value heads, nor have copies of them evenly; take a "
            "divisor or a multiple of them"
        )

    if kinds := _rotations(told) & _BY_LENGTH:
        raise ValueError(
            f"its rotary positions are of the kind {kinds.pop()}, which depends on the longest position of a forward, "
            "and ranks would see different ones"
        )


def _rotations(told: Mapping[str, Any]) -> set[str]:
    """The kinds of its rotary positions, which may be given by the kind of layer."""
    found = told.get("rope_scaling") or told.get("rope_parameters") or {}
    each = [found, *(one for one in found.values() if isinstance(one, dict))]
    return {str(one.get("rope_type") or one.get("type")) for one in each}


def check_layers(model: Any) -> None:
    """Raises ValueError for a convolution or a recurrence in a model, whatever its family is called."""
    kinds = {type(module).__name__ for module in model.modules()}
    carried = sorted(kind for kind in kinds if kind.startswith("Conv1d") or "Mamba" in kind or "GatedDelta" in kind)
    if carried:
        raise ValueError(f"{model.config.model_type}: it has {', '.join(carried)}, so {_STATE}")


def mixtures() -> list[str]:
    """The families of mixtures of experts."""
    return [name for name, family in FAMILIES.items() if family.routing]


def logit_divisor(config: Any) -> float:
    """The number by which a family divides `hidden @ lm_head.weight.T`: as a temperature does. `config` is the model's
    own.

    Raises ValueError where its logits are changed in any other way.
    """
    family = FAMILIES.get(config.model_type)
    setting = family.divisor if family else None
    changed = [
        f"{each}={value}"
        for each in _LOGIT_CHANGES
        if each != setting and (value := getattr(config, each, None)) not in (None, 1, 1.0)
    ]
    if changed:
        raise ValueError(f"{config.model_type}: the logits must be a plain product, and {changed[0]} changes them")
    return float(getattr(config, setting)) if setting else 1.0


def _known_fault(told: Mapping[str, Any]) -> str | None:
    """What excludes a family that has no name here."""
    kinds = set(told.get("layer_types") or ()) - _LAYER_KINDS
    if kinds:
        return f"layers of the kind {', '.join(sorted(kinds))}: {_STATE}"
    family = FAMILIES.get(str(told["model_type"]))
    if any(told.get(count) for count in EXPERT_COUNTS) and not (family and family.routing):
        return f"it is a mixture of experts, and those that are tested are {', '.join(mixtures())}"
    if method := (told.get("quantization_config") or {}).get("quant_method"):
        return f"its weights are quantized ({method}); take the model in bfloat16 or float32"
    return None

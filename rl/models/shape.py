"""What memory and time depend on in a model, by its `config.json`. No torch: a plan is made where no model is.

The one place that says how many bytes a learner or an engine holds of a model: preflight, `fresco plan` and the
measurements on GPUs (`experiments/gpu`) ask here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rl.wire.columns import EXPERT_COUNTS

_MASTER = 4  # bytes of a number in float32
_LOGITS = 1 << 29  # bytes of a chunk's logits on a GPU
_TIED = ("gemma3_text", "smollm3", "starcoder2")  # by themselves: their files may leave that out
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def logprob_chunk(given: int | None, vocabulary: int, device: str) -> int:
    """Tokens whose logits are made at once (`learner.logprob_chunk`). A GPU is given large products, and adds up the
    head's gradient fewer times; a CPU what its caches like."""
    if given is not None:
        return given
    return 256 if device == "cpu" else max(256, _LOGITS // (vocabulary * _MASTER))


@dataclass(frozen=True)
class ModelShape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    """Hidden units of the feed-forward layer; of all experts together."""
    active: int
    """Those that a token passes: of its own experts."""
    vocabulary: int
    chosen: int = 0
    """Experts of a token; 0 in a dense model."""
    experts: int = 0
    """Parameters of all experts of a layer, shared ones left out."""
    count: int = 0
    """Experts of a layer, shared ones left out."""
    tied: bool = False
    """Whether the head is the embedding."""
    max_length: int | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ModelShape:
        """By what `config.json` says. Raises ValueError where it lacks what a language model says of itself."""
        told = told.get("text_config", told)

        def number(key: str, default: int | None = None) -> int:
            value = told.get(key) or default
            if not isinstance(value, int) or value < 1:
                raise ValueError(
                    f"config.json has no {key!r} that is a number" if value is None else f"{key}={value!r}"
                )
            return value

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        width = active = number("intermediate_size", 4 * hidden)
        chosen = each = 0
        if experts := next((told[name] for name in EXPERT_COUNTS if told.get(name)), 0):
            chosen = number("num_experts_per_tok")
            each = number("moe_intermediate_size", width)
            shared = told.get("shared_expert_intermediate_size") or (told.get("n_shared_experts") or 0) * each
            dense = told.get("first_k_dense_replace") or 0  # layers without experts; the mean stands for all
            layers = number("num_hidden_layers")
            width, active = (
                (dense * width + (layers - dense) * (count * each + shared)) // layers for count in (experts, chosen)
            )

        return cls(
            layers=number("num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=number("num_key_value_heads", heads),
            head_dim=number("head_dim", hidden // heads),
            width=width,
            vocabulary=number("vocab_size"),
            tied=bool(told.get("tie_word_embeddings", told.get("model_type") in _TIED)),
            max_length=told.get("max_position_embeddings"),
            chosen=chosen,
            active=active,
            experts=3 * hidden * each * experts,
            count=experts,
        )

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads) + 3 * self.hidden * self.width

    @property
    def matrix(self) -> int:
        """Parameters of the embedding, and of the head."""
        return self.vocabulary * self.hidden

    @property
    def trained(self) -> int:
        """Parameters, a tied head counted once."""
        return self.layers * self.layer + self.matrix * (1 if self.tied else 2)

    @property
    def valuing(self) -> int:
        """Parameters of a critic of this shape, whose head gives one number."""
        return self.layers * self.layer + self.matrix

    @property
    def served(self) -> int:
        """Parameters as an engine on a CPU holds them: a tied head is given its own."""
        return self.layers * self.layer + 2 * self.matrix

    def locked(self, ranks: int) -> float:
        """Bytes of the host for a byte of the model in locked pages. Torch rounds up each tensor to a power of two, or
        each part of it, where so many ranks have it."""
        queries = self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        matrices = [(self.layers * 2, self.hidden * queries), (self.layers * 2, self.hidden * keys)]
        matrices += [(self.layers * 3, self.hidden * self.width - self.experts // 3), (2 - self.tied, self.matrix)]
        matrices += [(self.layers, self.experts // 3), (self.layers, 2 * self.experts // 3)]  # of all experts as one

        parts = [(count, math.ceil(size / ranks)) for count, size in matrices if size > 0]
        rounded = sum(count * (1 << (size - 1).bit_length()) for count, size in parts)
        return rounded / sum(count * size for count, size in parts)

    def adapters(self, rank: int, targets: Collection[str] | None = None) -> int:
        """Parameters of adapters beside the layers of these names; None: beside all but the head. A name that is not
        known here counts like the largest layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        sides = dict.fromkeys(("q_proj", "o_proj"), queries) | dict.fromkeys(("k_proj", "v_proj"), keys)
        sides |= dict.fromkeys(_FEED_FORWARD, self.width)
        every = [name for name in sides if not self.chosen or name not in _FEED_FORWARD]  # no adapter beside experts
        sides |= {"qkv_proj": queries + 2 * keys, "gate_up_proj": 2 * self.width}

        head = rank * (self.hidden + self.vocabulary) if targets and "lm_head" in targets else 0
        named = every if targets is None else set(targets) - {"lm_head", "experts"}
        of_layer = sum(self.hidden + sides.get(name, 2 * self.width) for name in named)
        if targets and "experts" in targets:
            of_layer += 2 * self.count * self.hidden + self.experts // self.hidden
        return rank * of_layer * self.layers + head

    def kv_bytes(self, number: int) -> int:
        """Keys and values of one token, with `number` bytes each."""
        return 2 * self.layers * self.kv_heads * self.head_dim * number

    @property
    def routing_bytes(self) -> int:
        """What router replay adds to each token on its way from the engine."""
        return self.layers * self.chosen

    def saved_bytes(self, number: int) -> int:
        """What one layer keeps of a token for its backward, without recomputation.

        Each norm keeps its input in float32, and two results in the dtype of the forward. Queries and keys are kept
        normed and turned, values and the attention's result once. The feed-forward layer keeps gate, its activation,
        the other half, and their product. A chosen expert has a copy of its input and of its result.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = 2 * self.hidden * (_MASTER + 2 * number)
        attention = queries * (_MASTER + 3 * number) + keys * (_MASTER + 3 * number)
        experts = (2 * self.chosen + 1) * self.hidden * number if self.chosen else 0
        return norms + attention + 4 * self.active * number + experts

    def exchanged_bytes(self, ranks: int, number: int) -> int:
        """What attention sends and gets of each token of a rank, where so many ranks compute a pack together."""
        return 2 * (self.heads + 2 * max(self.kv_heads, ranks)) * self.head_dim * number

    def head_bytes(self, tokens: int, chunk: int, number: int, *, moves: bool = True, reduced: int = _MASTER) -> int:
        """What log-probabilities of `tokens` and their backward take at their peak, `chunk` tokens at a time.

        The head's gradient in float32, as ranks add it up (`reduced` bytes a number), and as it is handed on, if the
        head `moves`. A chunk's probabilities, their gradient, and that as an operand; the last norm's share of each
        token.
        """
        logits = min(chunk, tokens) * self.vocabulary * (2 * _MASTER + number)
        return (
            self.matrix * (_MASTER + reduced + number) * moves + logits + tokens * self.hidden * (_MASTER + 3 * number)
        )

    def flops(self, lengths: Iterable[int], loss_tokens: int) -> float:
        """Of a training step, without recomputation: 6 for each parameter that a token passes, the head on trained
        tokens only, and causal attention."""
        lengths = list(lengths)
        pairs = sum(length * length for length in lengths)
        attention = 6.0 * pairs * self.heads * self.head_dim * self.layers
        passed = self.layer - 3 * self.hidden * (self.width - self.active)
        return 6.0 * passed * self.layers * sum(lengths) + 6.0 * self.matrix * loss_tokens + attention

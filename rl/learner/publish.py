"""Turns a sharded policy into a version on the wire: every rank copies its own rows, and a probe travels along.

The log-probabilities of the probe, a short prompt, are computed by all ranks and go out with the version; every
engine computes them again after loading. Wrong weights differ at once. From the first batch on the probe is a text of
the run. Rounding does to it what it does to all that is trained, which is not so for ids that no text has. The first
version is tried with a fixed text, in the words of the model's own tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
from transformers import AutoTokenizer

from rl.config.lora import served_adapter
from rl.config.schema import Config
from rl.learner.credit import gathered
from rl.learner.run_client import Client
from rl.models.packing import sequence_pack
from rl.models.protocol import Exported, PolicyModel
from rl.weights.channel import Entry
from rl.weights.updater import EXACT_PROBE_TOKENS, LONG_PROBES, PROBE_TOKENS
from rl.wire.messages import BatchPart
from rl.wire.run import RunFile

_NEIGHBOUR_TOKENS = 8
_PROBE_TEXT = """Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?
In May she sold 48 / 2 = 24 clips, so altogether 48 + 24 = 72.

def total(april: int) -> int:
    return april + april // 2
"""


def weight_entries(policy: PolicyModel, run: RunFile) -> list[Entry]:
    """All tensors that engines get, in their dtype."""
    dtype = run.config.generator.dtype
    return [(name, placement.shape, dtype) for name, _, placement in served(policy, run)]


def served(policy: PolicyModel, run: RunFile) -> Iterator[Exported]:
    """This rank's rows of what engines get: the weights, or the adapters that they add to their own."""
    return policy.export(untie=run.untied) if served_adapter(run.config.model) is None else policy.adapters()


def probe_length(config: Config, announced: int) -> int:
    """Most tokens of a probe, when a learner has announced so many versions since it started."""
    exact = config.model.dtype == config.generator.dtype == "float32"
    length = EXACT_PROBE_TOKENS if exact and announced >= LONG_PROBES else PROBE_TOKENS
    return min(length, config.generator.max_model_len - 1)


def probe_prompt(model: Path | None, vocab_size: int, length: int) -> list[int]:
    """`length` ids at most, the same in every process of every run of a model.

    Those of a text; ids spread over the vocabulary where the tokenizer in the folder `model` hardly knows its words (a
    tiny model), or there is none.
    """
    if model is not None and list(model.glob("tokenizer*")):
        ids: list[int] = AutoTokenizer.from_pretrained(model).encode(_PROBE_TEXT, add_special_tokens=False)[:length]
        if len(set(ids)) > length // 2 and max(ids) < vocab_size:
            return ids
    return [(vocab_size // 2 + 7919 * place) % vocab_size for place in range(length)]


@torch.no_grad()
def probe_logp(policy: PolicyModel, ids: list[int]) -> list[float]:
    """Log-probabilities in nats of ids[1:] at temperature 1: one forward of all ranks; none for no ids.

    Another sample stands before them in the pack. An engine computes them alone: a model whose samples leak into the
    next one of a pack differs from it.
    """
    if not ids:
        return []
    # Backwards, because it would be the beginning of a probe of such ids; it is short, so a forward has it first.
    before = probe_prompt(None, policy.vocab_size, _NEIGHBOUR_TOKENS)[::-1]
    pack = sequence_pack(before, ids).to(policy.device)
    logp: list[float] = policy(pack).logp[len(before) + 1 :].tolist()
    return logp


class Publisher:
    """Every rank has one; all call `publish` together."""

    def __init__(self, policy: PolicyModel, client: Client) -> None:
        self._policy = policy
        self._client = client

        config = client.config
        self._announced = 0
        self._probe_text: list[int] = []
        self._text_is_of_run = False
        if config.weights.probe:
            vocab_size = policy.vocab_size
            self._probe_text = probe_prompt(client.run.model_folder, vocab_size, probe_length(config, 0))

    def publish(self, n: int, batch: BatchPart | None = None) -> None:
        """Offer the present weights as version `n`; all ranks call it together. Raises WaitExpired, WeightsError.

        The first `batch`, of which this rank has its part, gives the probe its ids.
        """
        config = self._client.config
        if self._probe_text and not self._text_is_of_run and batch is not None and batch.lengths:
            self._probe_text = batch.columns["token_ids"][: probe_length(config, 0)].tolist()
            self._text_is_of_run = True

        own = self._probe_text[: probe_length(config, self._announced)]
        # Rank 0 alone knows what it announced, and ranks that compute a pack together must have the same one.
        ids = msgspec.msgpack.decode(gathered(msgspec.msgpack.encode(own))[0], type=list[int])
        with self._client.span("publish"):
            pieces = served(self._policy, self._client.run)
            self._announced += self._client.publish(n, pieces, ids, probe_logp(self._policy, ids))

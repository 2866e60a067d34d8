"""From a sharded policy to a version on the wire: every rank copies its own rows, and a probe travels along.

The log-probabilities of the probe, a short prompt, are computed by all ranks and go out with the version; every
engine computes them again after loading. Wrong weights differ at once. From the first batch on the probe is a text of
the run: rounding does to it what it does to all that is trained, which is not so for ids that no text has. The first
version is tried with a fixed text, in the words of the model's own tokenizer.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoTokenizer

from rl.core.messages import Shard
from rl.core.run import RunFile
from rl.learner.export import write_shard
from rl.learner.link import LearnerLink
from rl.learner.page_lock import PageLock
from rl.learner.policy import Policy, export_entries, local_rows
from rl.weights.layout import Manifest, Segment

PROBE_TOKENS = 64
_PROBE_TEXT = """Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?
In May she sold 48 / 2 = 24 clips, so altogether 48 + 24 = 72.

def total(april: int) -> int:
    return april + april // 2
"""


def weight_manifest(policy: Policy, run: RunFile) -> Manifest:
    """The layout of a slot: all tensors of the model's files, in the engine's dtype."""
    dtype = run.config.generator.dtype
    return Manifest.layout([(name, shape, dtype) for name, shape in export_entries(policy)])


def probe_prompt(model: Path | None, vocab_size: int, max_model_len: int) -> list[int]:
    """At most 64 ids, the same in every process of every run of a model.

    Those of a text; ids spread over the vocabulary where the tokenizer in the folder `model` hardly knows its words (a
    tiny model), or there is none.
    """
    length = min(PROBE_TOKENS, max_model_len - 1)
    if model is not None and list(model.glob("tokenizer*")):
        ids: list[int] = AutoTokenizer.from_pretrained(model).encode(_PROBE_TEXT, add_special_tokens=False)[:length]
        if len(set(ids)) > length // 2 and max(ids) < vocab_size:
            return ids
    return [(vocab_size // 2 + 7919 * place) % vocab_size for place in range(length)]


class Publisher:
    """Every rank has one; all call `publish` together."""

    def __init__(self, policy: Policy, manifest: Manifest, link: LearnerLink) -> None:
        self._policy = policy
        self._manifest = manifest
        self._link = link

        config = link.config
        self.probe_ids: list[int] = []
        self._longest_probe = min(PROBE_TOKENS, config.generator.max_model_len - 1)
        self._probe_is_of_run = False
        if config.weights.probe:
            vocab_size = policy.model.config.vocab_size
            self.probe_ids = probe_prompt(link.run.model_folder, vocab_size, config.generator.max_model_len)

        self._page_lock = PageLock(next(policy.parameters()).device)

    def publish(self, n: int, batch: Shard | None = None) -> None:
        """Offer the present weights as version `n`; all ranks call it together. Raises WaitExpired, WeightsError.

        The first `batch`, of which this rank has its part, gives the probe its ids.
        """
        if self.probe_ids and not self._probe_is_of_run and batch is not None and batch.lengths:
            self.probe_ids = batch.columns["token_ids"][: self._longest_probe].tolist()
            self._probe_is_of_run = True

        with self._link.span("publish"):
            self._link.publish(n, self._write, self.probe_ids, self._probe())

    def _write(self, view: memoryview) -> list[Segment]:
        if self._link.config.weights.transport == "shm":  # else a slot is mostly empty: a rank holds its own rows
            self._page_lock.add(view)
        return write_shard(view, self._manifest, local_rows(self._policy))

    @torch.no_grad()
    def _probe(self) -> list[float]:
        """Log-probabilities of probe_ids[1:], at temperature 1: one forward of all ranks."""
        if not self.probe_ids:
            return []
        ids = torch.tensor(self.probe_ids, device=next(self._policy.parameters()).device)  # (P,)
        logp = self._policy(ids, torch.arange(len(ids), device=ids.device)).logp  # (P,)
        probe: list[float] = logp[1:].tolist()
        return probe

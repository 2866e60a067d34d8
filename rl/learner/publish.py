"""From a sharded policy to a version on the wire: every rank copies its own rows, and a probe travels along.

The probe is a fixed short prompt. Its log-probabilities under the new weights, computed by all ranks together,
go out with the version; every engine computes them again after loading. Wrong weights differ at once.
"""

from __future__ import annotations

import torch

from rl.core.messages import Version
from rl.core.run import RunFile
from rl.learner.export import write_shard
from rl.learner.link import LearnerLink
from rl.learner.policy import Policy, export_entries, local_rows
from rl.weights.layout import Manifest, Segment

PROBE_TOKENS = 16


def weight_manifest(policy: Policy, run: RunFile) -> Manifest:
    """The layout of a slot: all tensors of the model's files, in the engine's dtype."""
    dtype = run.config.generator.dtype
    return Manifest.layout([(name, shape, dtype) for name, shape in export_entries(policy)])


def probe_prompt(vocab_size: int, max_model_len: int) -> list[int]:
    """At most 16 ids spread over the vocabulary, the same in every process of every run of a model."""
    length = min(PROBE_TOKENS, max_model_len - 1)
    return [(vocab_size // 2 + 7919 * place) % vocab_size for place in range(length)]


class Publisher:
    """Every rank has one; all call `publish` together."""

    def __init__(self, policy: Policy, manifest: Manifest, link: LearnerLink) -> None:
        self._policy = policy
        self._manifest = manifest
        self._link = link

        config = link.config
        vocab_size = policy.model.config.vocab_size
        self.probe_ids = probe_prompt(vocab_size, config.generator.max_model_len) if config.weights.probe else []

    def publish(self, version: Version) -> None:
        """Offer the present weights as `version`; all ranks call it together. Raises WaitExpired, WeightsError."""
        self._link.publish(version, self._write, self.probe_ids, self._probe())

    def _write(self, view: memoryview) -> list[Segment]:
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

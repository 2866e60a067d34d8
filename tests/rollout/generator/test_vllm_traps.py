"""What vLLM gets wrong silently, each with a test on the real engine.

* Tied embeddings leave a stale head after an update on CPU: `test_tied_embeddings`.
* The prefix cache of old weights survives an update that does not clear it: `test_prefix_cache_after_update`
  (under `keep`: test_vllm_engine).
* A running request keeps the KV of the old weights: test_vllm_engine, `recompute` against `keep`.
* Log-probabilities are taken before the temperature by default: test_vllm_engine, `distribution`.
* A per-request seed with a split prefill kills the CPU engine for everyone: `test_seeds_and_long_prompts`.
* The first request with log-probabilities compiles for seconds: `test_first_request_compiles_nothing`.
* A seed must mean the same sample in any batch: `test_seeded_requests_repeat_in_any_batch`.
* An evaluation's greedy requests in the batch must not change what others report: `test_mixed_temperatures`.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.rollout.generator.vllm_rig import MAX_NUM_SEQS, PROBE, TOLERANCE, Rig

pytestmark = pytest.mark.slow

LONG = [1 + (3 * i) % 250 for i in range(440)]


def test_tied_embeddings(tied_rig: Rig) -> None:
    for _ in range(3):
        report = tied_rig.update()
        assert np.abs(np.array(report.probe_logp) - tied_rig.reference(tied_rig.n, PROBE)).max() < TOLERANCE
        request = tied_rig.request(PROBE)
        (result,) = tied_rig.generate(request)
        assert tied_rig.error(request, result) < TOLERANCE


def test_first_request_compiles_nothing(tied_rig: Rig) -> None:
    before = tied_rig.cpu_seconds()
    tied_rig.generate(tied_rig.request(PROBE, max_tokens=2, top_p=0.95, seed=1))
    assert tied_rig.cpu_seconds() - before < 2.0  # a compile is 3 to 16 seconds, of the processor and not of the clock


def test_prefix_cache_after_update(rig: Rig) -> None:
    for policy in ("recompute", "abort", "drain"):
        rig.engine.on_update = policy
        rig.generate(rig.request(LONG))
        rig.update()
        request = rig.request(LONG)
        (result,) = rig.generate(request)
        assert rig.error(request, result) < TOLERANCE, policy


def test_seeds_and_long_prompts(rig: Rig) -> None:
    """More prompt tokens at once than one step may hold: a prefill must wait for the next step, not be split."""
    requests = [rig.request([1 + i, *LONG], seed=i) for i in range(MAX_NUM_SEQS)]
    results = rig.generate(*requests)
    assert max(rig.error(*pair) for pair in zip(requests, results, strict=True)) < TOLERANCE


def test_seeded_requests_repeat_in_any_batch(rig: Rig) -> None:
    seeded = [rig.request(PROBE[: 5 + i], seed=100 + i) for i in range(12)]
    alone = [rig.generate(request)[0].token_ids for request in seeded]
    crowd = [rig.request(PROBE[: 3 + i]) for i in range(12)]
    together = [result.token_ids for result in rig.generate(*crowd, *seeded)[12:]]
    assert together == alone


def test_mixed_temperatures(rig: Rig) -> None:
    kinds: list[dict[str, float]] = [{"temperature": 0.0}, {"temperature": 0.5}, {}, {"temperature": 1.5, "top_p": 0.8}]
    requests = [rig.request(PROBE, **kinds[i % 4]) for i in range(16)]
    for i, (request, result) in enumerate(zip(requests, rig.generate(*requests), strict=True)):
        distribution = {"temperature": 1.0} if i % 4 == 0 else kinds[i % 4]  # greedy reports the plain model
        assert rig.error(request, result, **distribution) < TOLERANCE

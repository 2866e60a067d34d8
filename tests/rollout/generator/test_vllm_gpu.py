"""The real engine on a GPU in bfloat16, with CUDA graphs: `pytest -m gpu` where vLLM is installed for it.

Transformers on the CPU in float32 is the judge, and the probe's tolerance the measure. Neighbouring versions are random
models that differ by nats, so what belongs to another version is far beyond it. Elsewhere these tests say that they did
not run; `test_vllm_engine` shows the same of the CPU engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.config.schema import load_config
from rl.weights.updater import Expected, LoadProof, tolerance
from rl.wire.messages import Fatal, WeightStatus
from rollout.generator.engines.base import Sampled
from tests.conftest import MakeRun
from tests.rollout.generator.test_vllm_engine import prompts
from tests.rollout.generator.test_vllm_process import Experts
from tests.rollout.generator.vllm_rig import PROBE, Rig, running

DTYPE = "bfloat16"
NATS = tolerance(load_config(None, [f"generator.dtype={DTYPE}"]))
LONG = [1 + (3 * i) % 250 for i in range(440)]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="not run: this machine shows no CUDA device"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["head of its own", "tied"])
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    yield from running(request.param, "cuda", DTYPE)


def expected(rig: Rig, status: WeightStatus) -> Expected:
    return Expected(status.version, status.checksum, tuple(PROBE), rig.reference(status.version.n, PROBE))


@pytest.mark.parametrize("distribution", [{}, {"temperature": 0.7}, {"top_p": 0.9}])
def test_log_probabilities_are_the_learners(rig: Rig, distribution: dict[str, float]) -> None:
    requests = [rig.request(prompt, **distribution) for prompt in prompts(8)]
    pairs = zip(requests, rig.generate(*requests), strict=True)
    errors = [rig.errors(request, sampled, **distribution) for request, sampled in pairs]
    assert np.concatenate(errors).mean() < NATS


def test_weights_that_are_loaded_again_reach_what_was_captured(rig: Rig) -> None:
    """CUDA graphs hold addresses: a load writes there, or the graphs go on with the weights before."""
    proof = LoadProof(NATS, probe=True)
    for _ in range(3):
        status = rig.update()
        proof.add(expected(rig, status))
        assert proof.fault(status) is None

        requests = [rig.request(prompt) for prompt in prompts(8)]  # decodes of a captured size, beside the prefill
        results = rig.generate(*requests)
        assert {version for result in results for version in result.policy_version} == {rig.n}
        assert np.concatenate([rig.errors(*pair) for pair in zip(requests, results, strict=True)]).mean() < NATS


def test_the_proof_sees_weights_that_stayed(rig: Rig) -> None:
    """The file of the next version has the weights of this one."""
    proof = LoadProof(NATS, probe=True)
    proof.add(expected(rig, rig.update()))
    old = rig.folder / f"weights.{rig.n}.safetensors"
    (rig.folder / f"weights.{rig.n + 1}.safetensors").write_bytes(old.read_bytes())

    status = rig.call(rig.load_next())
    proof.add(expected(rig, status))
    assert proof.fault(status) is not None
    rig.update()


def test_each_token_is_tagged_with_the_weights_that_sampled_it(rig: Rig) -> None:
    requests = [rig.request(prompt, max_tokens=300) for prompt in prompts(32)]
    rig.publish(rig.n + 1)

    async def run() -> list[Sampled]:
        tasks, tokens = rig.watch(requests)
        while min(tokens) < 30:
            await asyncio.sleep(0.001)
        await rig.load_next()
        return await asyncio.gather(*tasks)

    results = rig.call(run())
    assert all(set(result.policy_version) == {rig.n - 1, rig.n} for result in results)
    for n in (rig.n - 1, rig.n):
        errors = [
            rig.errors(request, result)[np.array(result.policy_version) == n]
            for request, result in zip(requests, results, strict=True)
        ]
        assert np.concatenate(errors).mean() < NATS, n


def test_no_prefix_of_old_weights_is_found_after_an_update(rig: Rig) -> None:
    rig.generate(rig.request(LONG))
    rig.update()
    request = rig.request(LONG)
    (result,) = rig.generate(request)
    assert rig.errors(request, result).mean() < NATS


def test_the_cache_has_the_size_that_was_asked_for(rig: Rig) -> None:
    config = rig.run.config.generator
    per_token = config.options["kv_cache_bytes"] / rig.info.kv_tokens
    assert per_token == pytest.approx(2 * 2 * 2 * 32 * 2, rel=0.1)  # keys and values, layers, heads, numbers, bytes


def test_experts_are_loaded_again_and_a_dead_engine_ends_the_generator(make_run: MakeRun, tmp_path: Path) -> None:
    """A generator process over the real transport: its reader copies from a locked slot."""
    experts = Experts(make_run, tmp_path / "model", DTYPE, "cuda")
    try:
        proof = LoadProof(NATS, probe=True)
        for n in range(3):
            status, due = experts.load(n)
            proof.add(due)
            assert proof.fault(status) is None

        engine = experts.engine_process()
        engine.kill()
        fatal = experts.outside.get(experts.outside.control, lambda each: isinstance(each, Fatal))
        assert isinstance(fatal, Fatal) and f"engine process {engine.pid} was killed by SIGKILL" in fatal.message
        assert experts.outside.process.wait(timeout=60) == 1
        engine.wait(60)
    finally:
        experts.outside.close()

"""The real engine on a GPU in bfloat16, with CUDA graphs: `pytest -m gpu` where vLLM is installed for it.

Transformers on the CPU in float32 is the judge, and the probe's tolerance the measure. Neighbouring versions are random
models that differ by nats, so what belongs to another version is far beyond it. Where there is no GPU these tests say
that they did not run, and `-m docs` tries their bodies on a CPU. `test_vllm_paths` has what a GPU's engine does
otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rl.weights.updater import Expected, LoadProof, tolerance
from rl.wire.messages import Fatal, WeightStatus
from tests.conftest import MakeRun
from tests.rollout.generator.test_vllm_engine import prompts
from tests.rollout.generator.test_vllm_process import Experts
from tests.rollout.generator.vllm_rig import DTYPES, ON_EACH_DEVICE, PROBE, SHAPE, Rig, running


@pytest.fixture(scope="module", params=ON_EACH_DEVICE)
def device(request: pytest.FixtureRequest) -> str:
    named: str = request.param
    return named


@pytest.fixture(scope="module", params=[False, True], ids=["head of its own", "tied"])
def rig(request: pytest.FixtureRequest, device: str) -> Iterator[Rig]:
    yield from running(request.param, device, DTYPES[device])


def expected(rig: Rig, status: WeightStatus) -> Expected:
    return Expected(status.version, status.checksum, tuple(PROBE), rig.reference(status.version.n, PROBE))


@pytest.mark.parametrize("distribution", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}])
def test_log_probabilities_are_the_learners(rig: Rig, distribution: dict[str, float]) -> None:
    requests = [rig.request(prompt, **distribution) for prompt in prompts(8)]
    assert rig.agrees(requests, rig.generate(*requests), **distribution)


def test_weights_that_are_loaded_again_reach_what_was_captured(rig: Rig) -> None:
    """CUDA graphs hold addresses: a load writes there, or the graphs go on with the weights before."""
    proof = LoadProof(tolerance(rig.run.config), probe=True)
    for _ in range(3):
        status = rig.update()
        proof.add(expected(rig, status))
        assert proof.fault(status) is None

        requests = [rig.request(prompt) for prompt in prompts(8)]  # decodes of a captured size, beside the prefill
        results = rig.generate(*requests)
        assert {version for result in results for version in result.policy_version} == {rig.n}
        assert rig.agrees(requests, results)


def test_the_proof_sees_weights_that_stayed(rig: Rig) -> None:
    """The file of the next version has the weights of this one."""
    proof = LoadProof(tolerance(rig.run.config), probe=True)
    proof.add(expected(rig, rig.update()))
    old = rig.folder / f"weights.{rig.n}.safetensors"
    (rig.folder / f"weights.{rig.n + 1}.safetensors").write_bytes(old.read_bytes())

    status = rig.call(rig.load_next())
    proof.add(expected(rig, status))
    assert proof.fault(status) is not None
    rig.update()


def test_the_cache_has_the_size_that_was_asked_for(rig: Rig) -> None:
    config = rig.run.config.generator
    per_token = config.options["kv_cache_bytes"] / rig.info.kv_tokens
    numbers = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]  # keys and values
    assert per_token == pytest.approx(numbers * (4 if rig.dtype == "float32" else 2), rel=0.1)


def test_experts_are_loaded_again_and_a_dead_engine_ends_the_generator(
    device: str, make_run: MakeRun, tmp_path: Path
) -> None:
    """A generator process over the real transport: its reader copies from a locked slot."""
    experts = Experts(make_run, tmp_path / "model", "bfloat16", device)
    try:
        proof = LoadProof(tolerance(experts.run.config), probe=True)
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

"""What vLLM does otherwise on a GPU, each with proof that it was done: `pytest -m gpu` where vLLM is installed for it.

Asynchronous scheduling, CUDA graphs, prompts in chunks, the prefix cache across updates, the four update policies,
preemption, aborts. A cache of four contexts and steps of 64 tokens make one engine do all of it. Bodies are the same
on a CPU, where `-m docs` tries them.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch

from rl.wire.messages import Generate
from rl.wire.run import ProcessContext
from rollout.generator.engines import vllm_settings
from rollout.generator.engines.base import Sampled
from tests.rollout.generator.vllm_rig import DTYPES, MAX_NUM_SEQS, ON_EACH_DEVICE, SHAPE, VOCABULARY, Rig

STEP = 64  # tokens of one step
CACHED = 2048  # tokens that the cache holds
KV_NUMBERS = 2 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]  # of one token
NUMBER_BYTES = {"float32": 4, "bfloat16": 2}
Update = Literal["recompute", "abort", "drain", "keep"]


@dataclass(frozen=True)
class Taken:
    """What the engine's steps computed."""

    steps: list[dict[str, int]]
    preempted: list[str]
    graphs: dict[str, int]

    def of(self, request: Generate) -> list[int]:
        """Tokens of each step that computed some of this request. vLLM adds to the names that it is given."""
        mark = f"{request.request_id}-"
        return [count for step in self.steps for name, count in step.items() if name.startswith(mark)]


class PathsRig(Rig):
    def __init__(self, device: str) -> None:
        dtype = DTYPES[device]
        cache = CACHED * KV_NUMBERS * NUMBER_BYTES[dtype]
        own = [f"generator.options.max_num_batched_tokens={STEP}", f"generator.options.kv_cache_bytes={cache}"]
        super().__init__(False, device, dtype, settings=own)
        self._random = random.Random(0)

    def start(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if self.device == "cpu":
                patch.setattr("rollout.generator.engines.vllm.engine_arguments", _in_chunks)
            super().start()
        self.call(self.engine._core.rpc("steps_watch"))

    def fresh(self, length: int, **fields: Any) -> Generate:
        """A request whose prompt nobody has read."""
        return self.request([self._random.randrange(1, VOCABULARY) for _ in range(length)], **fields)

    def again(self, request: Generate, **fields: Any) -> Generate:
        return self.request(request.prompt_ids.tolist(), **fields)

    def taken(self) -> Taken:
        """Since the last call."""
        (told,) = self.call(self.engine._core.rpc("steps_taken"))
        return Taken(**told)


def _in_chunks(context: ProcessContext) -> tuple[Any, bool]:
    """A GPU's way on a CPU, where a run takes whole prompts because of requests with a seed."""
    arguments, untied = vllm_settings.engine_arguments(context)
    arguments.enable_chunked_prefill = True
    return arguments, untied


@pytest.fixture(scope="module", params=ON_EACH_DEVICE)
def shared_paths(request: pytest.FixtureRequest) -> Iterator[PathsRig]:
    rig = PathsRig(request.param)
    rig.start()
    yield rig
    rig.stop()


@pytest.fixture
def rig(shared_paths: PathsRig) -> PathsRig:
    shared_paths.engine.on_update = "recompute"
    shared_paths.taken()
    return shared_paths


def test_the_engine_takes_the_path_of_its_device(rig: PathsRig) -> None:
    expected: dict[str, Any] = {
        "runner": "vllm.v1.worker.cpu_model_runner",
        "asynchronous": False,
        "batches at once": 1,
        "graphs": "NONE",
        "attention": ["CPU_ATTN"],
        "attention version": [0],
    }
    if rig.device == "cuda":
        generation = torch.cuda.get_device_capability()[0]
        expected = {
            "runner": "vllm.v1.worker.gpu.model_runner",  # the second one; that of before is gpu_model_runner
            "asynchronous": True,
            "batches at once": 2,
            "graphs": "FULL_AND_PIECEWISE",
            "attention": ["FLASH_ATTN"],
            "attention version": [{9: 3, 10: 4}.get(generation, 2)],
        }

    (path,) = rig.call(rig.engine._core.rpc("path_taken"))
    assert path == expected | {"chunked prefill": True, "prefix cache": True}
    assert rig.engine._core.config.use_v2_model_runner == (rig.device == "cuda")


def test_graphs_are_replayed_of_prompts_and_of_decodes(rig: PathsRig) -> None:
    """After an update, too: graphs hold addresses, and a load writes there."""
    for _ in range(2):
        rig.update()
        rig.taken()
        requests = [rig.fresh(20) for _ in range(8)]
        assert rig.agrees(requests, rig.generate(*requests))

        replayed = rig.taken().graphs
        assert replayed.keys() == ({"FULL", "PIECEWISE"} if rig.device == "cuda" else set())


def test_a_step_is_scheduled_before_the_one_before_is_known(rig: PathsRig) -> None:
    """Only then is a request that ends by itself computed for one token more than it has."""
    request = rig.fresh(30, max_tokens=400, stop_token_ids=list(range(VOCABULARY // 2)))
    (result,) = rig.generate(request)
    assert result.finish_reason == "stop" and rig.agrees([request], [result])
    needed = len(request.prompt_ids) + len(result.token_ids) - 1
    assert sum(rig.taken().of(request)) - needed == (rig.device == "cuda")


def test_a_prompt_longer_than_a_step_is_read_in_chunks(rig: PathsRig) -> None:
    """Beside the decodes of others, whose tokens are taken from the same step."""
    requests = [rig.fresh(length) for length in (30, 300, 200, 40)]
    assert rig.agrees(requests, rig.generate(*requests))

    taken = rig.taken()
    assert max(sum(step.values()) for step in taken.steps) <= STEP
    for request in requests:
        chunks = [count for count in taken.of(request) if count > 1]
        assert len(chunks) >= len(request.prompt_ids) / STEP


def test_requests_that_were_preempted_go_on_as_if_nothing_had_happened(rig: PathsRig) -> None:
    requests = [rig.fresh(30, max_tokens=120) for _ in range(MAX_NUM_SEQS)]
    results = rig.generate(*requests)
    taken = rig.taken()
    names = {name.partition("-")[0] for name in taken.preempted}
    preempted = [request for request in requests if str(request.request_id) in names]
    assert preempted, "the cache held all of them"
    assert all(sum(taken.of(request)) >= 30 + 120 for request in preempted)  # one more than each needs, at least

    assert all(len(result.token_ids) == result.tokens_generated == 120 for result in results)
    assert all(set(result.policy_version) == {rig.n} for result in results)
    assert rig.agrees(requests, results)


def test_an_update_reaches_those_that_wait_to_go_on(rig: PathsRig) -> None:
    requests = [rig.fresh(30, max_tokens=300) for _ in range(MAX_NUM_SEQS)]
    rig.publish(rig.n + 1)

    async def run() -> list[Sampled]:
        tasks, tokens = rig.watch(requests)
        while sum(tokens) < 2 * CACHED:
            await asyncio.sleep(0.001)
        await rig.load_next()
        return await asyncio.gather(*tasks)

    results = rig.call(run())
    assert rig.taken().preempted
    versions = {version for result in results for version in result.policy_version}
    assert versions == {rig.n - 1, rig.n}
    assert rig.agrees(requests, results)


@pytest.mark.parametrize("on_update", ["recompute", "abort", "drain", "keep"])
def test_an_update_by_each_policy(rig: PathsRig, on_update: Update, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran, what came meanwhile, and a prompt that the cache had."""
    monkeypatch.setattr("rollout.generator.engines.vllm.DRAIN_S", 240)
    rig.engine.on_update = on_update
    known = rig.fresh(200)
    again = rig.again(known)
    for request in (known, again):
        rig.generate(request)
    assert sum(rig.taken().of(again)) < 100, "the cache found nothing of the same version"

    requests = [rig.fresh(40, max_tokens=400) for _ in range(3)]
    meanwhile = rig.fresh(40)

    results, late = rig.update_amid(requests, meanwhile, tokens=10)
    assert set(late.policy_version) == {rig.n} and rig.agrees([meanwhile], [late])
    _ran_through(rig, on_update, requests, results)

    rig.taken()
    new, own = rig.again(known), rig.again(known, session=known.session)
    (result,) = rig.generate(new)
    assert sum(rig.taken().of(new)) >= 200, "keys and values of older weights were found"
    assert set(result.policy_version) == {rig.n} and rig.agrees([new], [result])
    if on_update == "keep":
        rig.generate(own)
        assert sum(rig.taken().of(own)) < 100, "an episode did not find its own"
        rig.engine.on_update = "recompute"
        rig.update()  # what was kept goes: a run has one policy, these tests share an engine


def _ran_through(rig: PathsRig, on_update: Update, requests: list[Generate], results: list[Sampled]) -> None:
    both = {rig.n - 1, rig.n}
    expected = {"recompute": both, "abort": {rig.n}, "drain": {rig.n - 1}, "keep": both}[on_update]
    for request, result in zip(requests, results, strict=True):
        assert len(result.token_ids) == 400 and set(result.policy_version) == expected
        assert (result.tokens_generated > 400) == (on_update == "abort")  # what it discarded counts
        if on_update != "keep":
            assert rig.agrees([request], [result])
            continue

        before = result.policy_version.count(rig.n - 1)
        errors = rig.errors(request, result)
        assert rig.close(errors[:before])
        assert errors[before:].mean() > 0.2  # new weights on keys and values of the old ones


def test_an_aborted_request_answers_with_what_it_has(rig: PathsRig) -> None:
    """While it decodes, within its prompt, and in the queue; the cache is free again afterwards."""
    running = [rig.fresh(30, max_tokens=400) for _ in range(4)]
    queued = [rig.fresh(300, max_tokens=400) for _ in range(8)]

    async def run() -> list[Sampled]:
        tasks, tokens = rig.watch(running)
        while min(tokens) < 32:
            await asyncio.sleep(0.001)
        tasks += [rig.begin(request) for request in queued]
        await asyncio.sleep(0)
        for request in [*running, *queued]:
            await rig.engine.abort(request.request_id)
        return await asyncio.gather(*tasks)

    results = rig.call(run())
    assert all(result.finish_reason == "abort" and len(result.token_ids) < 400 for result in results)
    assert all(len(result.token_ids) >= 32 for result in results[:4])
    assert rig.agrees(running, results[:4])

    requests = [rig.fresh(470) for _ in range(3)]
    rig.taken()
    assert rig.agrees(requests, rig.generate(*requests))
    assert not rig.taken().preempted

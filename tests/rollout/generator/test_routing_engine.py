"""The column `routed_experts` of the real engine: the experts that each position was routed to, whatever happens.

On a GPU vLLM tells them itself (`-m gpu`), on a CPU what this project adds to it (`-m families`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.models.packing import sequence_pack
from rl.models.policy import Policy
from rl.models.protocol import ModelOptions
from rl.wire.columns import COLUMNS, register, routed_experts
from rl.wire.messages import Generate
from rollout.generator.engines.base import Sampled
from tests.rl.models.test_routers import own_choices
from tests.rollout.generator.test_families_engine import FamilyRig
from tests.rollout.generator.vllm_rig import MAX_NUM_SEQS, ON_A_GPU

pytestmark = pytest.mark.families
SHAPE: dict[str, Any] = {"num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4}
CACHED = 2048  # tokens that the cache holds: four contexts
PROMPT = [(7 * i * i + 3 * i + 11) % 250 + 3 for i in range(70)]


class MixtureRig(FamilyRig):
    """Experts enough that engine and learner in bfloat16 choose differently now and then."""

    def __init__(self, folder: Path, dtype: str, own_process: bool, device: str) -> None:
        per_token = 3 * 2 * 2 * 32 * (4 if dtype == "float32" else 2)  # layers, keys and values, heads, numbers
        cache = [f"generator.options.kv_cache_bytes={CACHED * per_token}"]
        super().__init__("qwen3_moe", folder, dtype, own_process, cache, device, **SHAPE)
        column = routed_experts(self.policies[0].model.config.to_dict())
        assert column is not None
        register(column)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("bfloat16", True, "cpu"), id="own_process"),
        pytest.param(("float32", False, "cpu"), id="own_thread"),
        pytest.param(("bfloat16", True, "cuda"), id="cuda", marks=ON_A_GPU),
    ],
)
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[MixtureRig]:
    before = dict(COLUMNS)
    rig = MixtureRig(tmp_path_factory.mktemp("models"), *request.param)
    rig.start()
    yield rig
    rig.stop()
    COLUMNS.clear()
    COLUMNS.update(before)


def entries(request: Generate, sampled: Sampled) -> np.ndarray:
    """(P - known + n, layers, k)."""
    return np.concatenate([sampled.context_arrays()["routed_experts"], sampled.arrays()["routed_experts"]])


def is_own(rig: MixtureRig, n: int, ids: list[int], found: np.ndarray, start: int = 0) -> None:
    """Nearly all entries are what the model of version n chooses in float32; all but the first are told."""
    expected = own_choices(rig.policies[n], ids).numpy()[start:]
    assert found.shape == expected.shape and (start > 0 or (found[0] == 255).all())
    equal = (np.sort(found, -1) == np.sort(expected, -1)).all(-1).mean()
    assert equal > (0.99 if rig.dtype == "float32" else 0.7), equal


def test_rows_of_requests_of_turns_and_of_the_prefix_cache(rig: MixtureRig) -> None:
    first = rig.request(PROMPT, max_tokens=40)
    again = rig.request(PROMPT, max_tokens=9)
    (one,) = rig.generate(first)
    (two,) = rig.generate(again)  # whose prompt comes from the cache
    for request, sampled in ((first, one), (again, two)):
        is_own(rig, rig.n, PROMPT + sampled.token_ids, entries(request, sampled))
    np.testing.assert_array_equal(entries(first, one)[:64], entries(again, two)[:64])

    history = PROMPT + one.token_ids
    turn = rig.request([*history, 5, 6, 7], known=len(history), max_tokens=20)
    (three,) = rig.generate(turn)
    assert len(three.context["routed_experts"]) == 3
    is_own(rig, rig.n, [*history, 5, 6, 7, *three.token_ids], entries(turn, three), start=len(history))

    continued = rig.request(history, known=len(history), max_tokens=5)
    (four,) = rig.generate(continued)
    assert len(four.context["routed_experts"]) == 0
    is_own(rig, rig.n, history + four.token_ids, entries(continued, four), start=len(history))


@pytest.mark.parametrize("on_update", ["recompute", "abort"])
def test_an_update_leaves_what_was_routed_before(rig: MixtureRig, on_update: str) -> None:
    rig.engine.on_update = on_update  # type: ignore[assignment]
    requests = [rig.request(PROMPT[: 40 + i], max_tokens=200) for i in range(4)]

    async def run() -> list[Sampled]:
        tasks, tokens = rig.watch(requests)
        while min(tokens) < 32:
            await asyncio.sleep(0.001)
        await rig.next()
        return [await task for task in tasks]

    old = rig.n
    for request, sampled in zip(requests, rig.call(run()), strict=True):
        ids = request.prompt_ids.tolist() + sampled.token_ids
        found = entries(request, sampled)
        assert len(found) == len(ids)
        before = sampled.policy_version.count(old)
        assert (before == 0) == (on_update == "abort")
        after = len(request.prompt_ids) + before
        if before:
            is_own(rig, old, ids[:after], found[:after])
        else:
            is_own(rig, rig.n, ids, found)


def test_rows_of_requests_that_were_preempted(rig: MixtureRig) -> None:
    """They are read again from their first token on, and each of their rows is told once."""
    rig.engine.on_update = "recompute"
    rig.call(rig.engine._core.rpc("steps_watch"))
    requests = [
        rig.request([3 + (7 * i + 5 * j) % 250 for j in range(30)], max_tokens=120) for i in range(MAX_NUM_SEQS)
    ]
    results = rig.generate(*requests)
    (taken,) = rig.call(rig.engine._core.rpc("steps_taken"))
    assert taken["preempted"], "the cache held all of them"
    for request, sampled in zip(requests, results, strict=True):
        is_own(rig, rig.n, request.prompt_ids.tolist() + sampled.token_ids, entries(request, sampled))


def test_a_request_that_is_aborted_has_entries_or_says_that_it_has_none(rig: MixtureRig) -> None:
    request = rig.request(PROMPT, max_tokens=400)

    async def run() -> Sampled:
        (task,), tokens = rig.watch([request])
        while tokens[0] < 32:
            await asyncio.sleep(0.001)
        await rig.engine.abort(request.request_id)
        return await task

    sampled = rig.call(run())
    assert sampled.finish_reason == "abort" and len(sampled.token_ids) >= 32
    is_own(rig, rig.n, PROMPT + sampled.token_ids, entries(request, sampled))


def test_the_learner_that_replays_is_nearer_to_the_engine(rig: MixtureRig) -> None:
    dtype = getattr(torch, rig.dtype)
    policy = Policy.load(rig.folders[rig.n], options=ModelOptions(dtype=dtype, router_replay=True))
    requests = [rig.request([each + i for each in PROMPT[:30]], max_tokens=100) for i in range(8)]
    gaps: dict[bool, list[torch.Tensor]] = {True: [], False: []}
    for request, sampled in zip(requests, rig.generate(*requests), strict=True):
        pack = sequence_pack(request.prompt_ids.tolist() + sampled.token_ids)
        for replays, found in gaps.items():
            with torch.no_grad():
                routing = torch.from_numpy(entries(request, sampled))
                logp = policy(pack.with_columns(routed_experts=routing) if replays else pack).logp
            found.append((logp[30:] - torch.tensor(sampled.logp)).abs())

    with_replay, without = (torch.cat(gaps[replays]) for replays in (True, False))
    if rig.dtype == "float32":
        assert with_replay.max() < 1e-4
    else:
        assert with_replay.mean() < 0.6 * without.mean() and with_replay.max() < 0.5 * without.max()

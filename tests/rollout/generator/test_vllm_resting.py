"""`placement=alternate` with the real engine on a CPU: no step while it rests, and it goes on under new weights."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest

from rollout.generator.engines.base import Sampled
from tests.rollout.generator.vllm_rig import TOLERANCE, Rig

pytestmark = pytest.mark.slow

REST_S = 0.5
LONG = 400


@pytest.mark.parametrize("on_update", ["recompute", "abort", "drain", "keep"])
def test_it_makes_no_step_and_loses_no_request(
    rig: Rig, on_update: Literal["recompute", "keep", "abort", "drain"]
) -> None:
    rig.engine.on_update = on_update
    requests = [rig.request([5 + i, 6, 7], max_tokens=LONG) for i in range(4)]
    later = rig.request([9, 8, 7], max_tokens=30)
    aborted = rig.request([3, 2, 1], max_tokens=LONG)
    first = rig.n

    async def scenario() -> list[Sampled]:
        tasks, tokens = rig.watch([*requests, aborted])
        while min(tokens) < 40:
            await asyncio.sleep(0.005)
        await rig.engine.rest()
        late = rig.begin(later)
        await asyncio.sleep(0.1)

        before, used_s = list(tokens), rig.cpu_seconds() if rig.own_process else 0.0
        await asyncio.sleep(REST_S)
        assert tokens == before and not late.done()
        if rig.own_process:
            assert rig.cpu_seconds() - used_s < REST_S / 5
        else:
            core: Any = rig.engine._core
            assert not core._core.scheduler.has_unfinished_requests()

        await rig.engine.abort(aborted.request_id)
        await rig.next()
        return [*await asyncio.gather(*tasks), await late]

    *ended, last, new = rig.call(scenario())
    assert new.policy_version == [first + 1] * 30 and rig.error(later, new) < TOLERANCE
    if on_update != "drain":
        assert last.finish_reason == "abort" and len(last.token_ids) < LONG
    for request, sampled in zip(requests, ended, strict=True):
        assert len(sampled.token_ids) == LONG
        versions = set(sampled.policy_version)
        assert versions == {"abort": {first + 1}, "drain": {first}}.get(on_update, {first, first + 1})
        if on_update != "keep":
            assert rig.error(request, sampled) < TOLERANCE


def test_it_wakes_with_the_version_that_it_had(rig: Rig) -> None:
    request = rig.request([1, 2, 3], max_tokens=LONG)

    async def scenario() -> Sampled:
        (task,), tokens = rig.watch([request])
        while tokens[0] < 40:
            await asyncio.sleep(0.005)
        for _ in range(2):
            await rig.engine.rest()
            rig.n -= 1
            status = await rig.load_next()
            assert status.version.n == rig.n
        return await task

    sampled = rig.call(scenario())
    assert set(sampled.policy_version) == {rig.n} and rig.error(request, sampled) < TOLERANCE

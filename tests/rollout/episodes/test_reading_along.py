"""What somebody who reads along is told: each token once, whatever becomes of requests, proxies and connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from rl.config.schema import load_config
from rl.wire.messages import Abort, Generate, Grown, Ticket, Version
from rollout.episodes.generation import GenerationClient
from rollout.episodes.sequence import GrowingSequence
from rollout.episodes.turns import TurnSampler
from tests.envs.harness import generated
from tests.rollout.trajectories import reply_columns


class Reader:
    """One turn of a ticket; the test is the proxy."""

    def __init__(self) -> None:
        config = load_config(None, ["generator.max_model_len=64", "sampling.max_tokens=20"])
        self.sent: list[Generate | Abort] = []
        self.client = GenerationClient(self.sent.append, abort_deadline_s=60)
        self.sampler = TurnSampler(Ticket(5, 0, 0, 0, Version(0, 3)), config, [9], self.client.generate)
        self.sequence = GrowingSequence([1, 2, 3])
        self.seen = 0
        self.told: list[int] = []
        self.turn = asyncio.create_task(self.sampler.turn(self.sequence, tell=self.told.extend))

    async def asked(self) -> Generate:
        """The next request."""
        while not (found := [each for each in self.sent[self.seen :] if isinstance(each, Generate)]):
            await asyncio.sleep(0)
        self.seen = len(self.sent)
        assert found[0].stream
        return found[0]

    def grew(self, request: Generate, place: int, *ids: int) -> None:
        self.client.grew(Grown({request.request_id: (place, reply_columns(ids, -0.25, 4))}))


def run(scene: Callable[[Reader], Coroutine[Any, Any, None]]) -> None:
    async def play() -> None:
        await asyncio.wait_for(scene(Reader()), 120)

    asyncio.run(play())


def test_what_comes_twice_or_too_late_is_told_once() -> None:
    async def scene(reader: Reader) -> None:
        request = await reader.asked()
        reader.grew(request, 0, 10, 11)
        reader.grew(request, 0, 10, 11, 12)  # delivered again over a new connection
        reader.grew(request, 5, 15)  # what stands between was lost
        assert reader.told == [10, 11, 12]
        reader.client.answered(generated(request, [10, 11, 12, 13, 14, 15, 9]))
        await reader.turn
        assert reader.told == [10, 11, 12, 13, 14, 15, 9]
        reader.grew(request, 7, 16)  # nobody waits any more

    run(scene)


def test_a_turn_that_generators_abort_goes_on_where_it_was() -> None:
    async def scene(reader: Reader) -> None:
        first = await reader.asked()
        reader.grew(first, 0, 10)
        reader.client.answered(generated(first, [10, 11], "abort"))
        second = await reader.asked()
        assert second.prompt_ids.tolist() == [1, 2, 3, 10, 11] and second.max_tokens == 18
        reader.grew(second, 0, 12)
        assert reader.told == [10, 11, 12]
        reader.client.answered(generated(second, [12, 9]))
        await reader.turn
        assert reader.told == [10, 11, 12, 9]

    run(scene)


def test_a_dead_proxy_does_not_take_back_what_was_read() -> None:
    async def scene(reader: Reader) -> None:
        first = await reader.asked()
        reader.grew(first, 0, 10, 11)
        reader.client.ask_again()
        second = await reader.asked()
        assert reader.sent[-2:] == [Abort(first.request_id), second] and second.request_id != first.request_id
        assert second.prompt_ids.tolist() == [1, 2, 3, 10, 11]
        assert second.version == Version(0, 4), "versions never go backwards inside a turn"

        reader.grew(first, 2, 77)  # another sample of what the dead one had asked for
        reader.client.answered(generated(first, [10, 11, 77, 9]))
        reader.client.answered(generated(second, [12, 9]))
        await reader.turn
        assert reader.told == reader.sequence.context().tolist()[3:] == [10, 11, 12, 9]
        assert reader.sequence.sequence().policy_version.tolist() == [-1] * 3 + [4] * 4
        assert reader.sampler.tokens_generated == 4

    run(scene)


def test_what_nobody_has_read_yet_is_asked_again_as_it_was() -> None:
    async def scene(reader: Reader) -> None:
        request = await reader.asked()
        reader.client.ask_again()
        assert reader.sent == [request, request]
        reader.client.answered(generated(request, [10, 9]))
        await reader.turn
        assert reader.told == [10, 9]

    run(scene)

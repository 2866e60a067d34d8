"""The agents on unmodified SDKs: whatever way a turn is asked for, one history is trained, with the tokens sampled."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any, Literal

import pytest

from envs.agents.clients import WAYS
from envs.agents.sdk_agent import SdkAgent, SdkAgentFamily, SdkAgentOptions, TwoSums, demonstrate
from envs.agents.tool_loop import Sum, called
from launch.warm_start.word_tokenizer import build_tokenizer, save_tokenizer
from rollout.episodes.environment import Outcome
from rollout.episodes.parsing import HermesParser, check_parser
from rollout.episodes.tokenizer import ChatTokenizer
from tests.envs.test_gateway import Rig, chat, run  # noqa: F401

TASK = TwoSums((Sum("add", 3, 4), Sum("multiply", 5, 6)))
CALLS = "\n".join(
    f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps({"a": a, "b": b})}}}\n</tool_call>'
    for name, a, b in (("add", 3, 4), ("multiply", 5, 6))
)


class Always(random.Random):
    """Draws the first way for every turn but those after the first, which are asked for whole."""

    def __init__(self, way: str) -> None:
        super().__init__(0)
        self.ways = [way]

    def choice(self, found: Any) -> Any:
        return self.ways.pop() if self.ways else "whole"


CLIENTS: list[Literal["openai", "anthropic"]] = ["openai", "anthropic"]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("way", ["whole", "stream", "retry"])
def test_two_calls_in_a_turn_however_the_model_is_asked(
    chat: ChatTokenizer,  # noqa: F811
    client: Literal["openai", "anthropic"],
    way: str,
) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = [CALLS, "7 30"]
        outcome = await SdkAgent(SdkAgentOptions(client=client), Always(way)).run(TASK, rig.endpoint)
        asked = {"whole": 2.0} if way == "whole" else {"whole": 1.0, way: 1.0}
        assert outcome == Outcome(1.0, True, info={**dict.fromkeys(WAYS, 0.0), "parallel_calls": 1.0, **asked})

        assert rig.session.joined == (way == "retry") and not rig.session.forest.forks
        (sequence,) = rig.session.forest.sequences()
        assert len(rig.asked) == len(sequence.turns) == 2

    run(chat, scene)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_slower_of_two_streams_is_given_up(
    chat: ChatTokenizer,  # noqa: F811
    client: Literal["openai", "anthropic"],
) -> None:
    """Its generation ends, and nothing of it is trained."""

    async def scene(rig: Rig) -> None:
        class ForOne(asyncio.Event):
            def is_set(self) -> bool:
                found = super().is_set()
                self.clear()  # the other one waits
                return found

        rig.says = [CALLS, CALLS]
        rig.hold = ForOne()
        agent = SdkAgent(SdkAgentOptions(client=client, turns=1), Always("cancel"))
        playing = asyncio.create_task(agent.run(TASK, rig.endpoint))
        while len(rig.asked) < 2:
            await asyncio.sleep(0.005)

        rig.hold.set()
        await playing
        while not rig.session.abandoned:
            await asyncio.sleep(0.005)
        (sequence,) = rig.session.forest.sequences()
        assert len(rig.asked) == 2 and len(sequence.turns) == 1

    run(chat, scene)


def test_half_of_an_answer_earns_half(chat: ChatTokenizer) -> None:  # noqa: F811
    async def scene(rig: Rig) -> None:
        for says, reward in ([CALLS, "7 31"], 0.5), ([CALLS, "30 7"], 0.0), (["7 30 1"], 1.0), (["<tool_call>"], 0.0):
            rig.says = list(says)
            outcome = await SdkAgent(SdkAgentOptions(), Always("whole")).run(TASK, rig.endpoint)
            assert (outcome.reward, outcome.success) == (reward, False), says

    run(chat, scene)


def test_demonstrations_are_read_by_the_parser(tmp_path: Path) -> None:
    family = SdkAgentFamily(SdkAgentOptions(), seed=0)
    shown = asyncio.run(demonstrate(family, 200, seed=1, mistakes=0.1, max_turns=3))
    right = 0
    for index, demonstration in enumerate(shown):
        task: TwoSums = family.task("train", index)
        calls = HermesParser().parse(demonstration.turns[0].action).calls
        assert [called(name, arguments) for name, arguments in calls] == demonstration.turns[1].action.split()
        right += demonstration.turns[1].action.split() == task.answers
    assert 30 < right < 170  # there is something left to learn
    questions = {split: {family.task(split, index).question for index in range(300)} for split in ("train", "eval")}
    assert not questions["train"] & questions["eval"]

    tokenizer = build_tokenizer([turn.action for demonstration in shown for turn in demonstration.turns])
    save_tokenizer(tokenizer, tmp_path, 256)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": tokenizer.token_to_id("<|im_end|>")}))
    check_parser(HermesParser(), ChatTokenizer(tmp_path))

"""The gateway over HTTP, asked by the SDKs themselves: answers, tools, streams, retries, keys and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from envs.gateway.server import Gateway
from experiments.gateway.agents import TOOLS
from experiments.gateway.tokenizers import make_folder
from rl.config.schema import load_config
from rl.wire.messages import Generate, Generated, Ticket, Version
from rollout.episodes.environment import Endpoint
from rollout.episodes.forest import Forest
from rollout.episodes.generation import Read
from rollout.episodes.parsing import HermesParser, TurnReader
from rollout.episodes.session import Session
from rollout.episodes.tokenizer import ChatTokenizer
from rollout.episodes.turns import TurnSampler
from tests.envs.harness import generated

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ASK: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add 1 and 2"}]
CLAUDE_TOOLS: list[Any] = [
    {"name": "add", "description": "Adds.", "input_schema": TOOLS[0]["function"]["parameters"]},
]


BODIES = (b"", b"[]", b"{", b"[" * 100_000, b'{"messages": 3}', b'{"messages": [{"role": []}]}', b'{"n": true}')


def nested(depth: int) -> dict[str, Any]:
    """A tool's schema."""
    found: dict[str, Any] = {"type": "string"}
    for _ in range(depth // 2):
        found = {"type": "object", "properties": {"a": found}}
    return found


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(make_folder("qwen3", tmp_path_factory.mktemp("model") / "qwen3"))


@dataclass
class Rig:
    """A gateway with one open session, whose engine says what the test has put into `says`."""

    chat: ChatTokenizer
    tokens: int = 200  # of one answer; ten times as many fit into the context
    says: list[str] = field(default_factory=list)
    asked: list[Generate] = field(default_factory=list)
    hold: asyncio.Event = field(default_factory=asyncio.Event)
    error: str = ""  # in the place of an answer
    session: Session = field(init=False)
    endpoint: Endpoint = field(init=False)

    def __post_init__(self) -> None:
        self.hold.set()
        limit = max(2048, 10 * self.tokens)
        config = load_config(None, [f"generator.max_model_len={limit}", f"sampling.max_tokens={self.tokens}"])
        ticket = Ticket(5, 0, 0, 0, Version(0, 3))
        sampler = TurnSampler(ticket, config, self.chat.stop_ids, self._generate)
        self.session = Session(sampler, Forest(TurnReader(self.chat, HermesParser()), limit=limit), grace_s=0.05)

    async def _generate(self, request: Generate, ending: asyncio.Future[None], read: Read | None = None) -> Generated:
        self.asked.append(request)
        ids = self.chat.encode(self.says.pop(0) if self.says else "")
        for place, id in enumerate(ids[: request.max_tokens - 1] if read else []):
            assert read is not None
            read(place, [id])
            await asyncio.sleep(0)
        while not self.hold.is_set() and not ending.done():
            await asyncio.sleep(0.005)
        if ending.done():
            return generated(request, [5, 6], "abort")
        if self.error:
            return generated(request, [], "error", error=self.error)

        cut = len(ids) >= request.max_tokens
        return generated(
            request, ids[: request.max_tokens] if cut else [*ids, self.chat.stop_ids[0]], "length" if cut else "stop"
        )

    @property
    def openai(self) -> Any:
        return openai.AsyncOpenAI(**self.endpoint.openai, max_retries=0, timeout=240)

    @property
    def anthropic(self) -> Any:
        return anthropic.AsyncAnthropic(**self.endpoint.anthropic, max_retries=0, timeout=240)


@asynccontextmanager
async def opened(chat: ChatTokenizer, tokens: int = 200) -> AsyncIterator[Rig]:
    rig = Rig(chat, tokens)
    gateway = Gateway()
    try:
        async with gateway.open(5, rig.session) as rig.endpoint:
            yield rig
    finally:
        await rig.session.close()
        await gateway.stop()


def run(chat: ChatTokenizer, scene: Callable[[Rig], Coroutine[Any, Any, None]], tokens: int = 200) -> None:
    async def play() -> None:
        async with opened(chat, tokens) as rig:
            await asyncio.wait_for(scene(rig), 240)

    asyncio.run(play())


def one_sequence(rig: Rig, turns: int) -> None:
    (sequence,) = rig.session.forest.sequences()
    assert len(sequence.turns) == turns and not rig.session.forest.forks


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_the_openai_sdk(chat: ChatTokenizer, stream: bool) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["<think>\nhm\n</think>\n\n" + CALL, "it is 3"]
        tools: Any = TOOLS
        if stream:
            chunks = [
                chunk
                async for chunk in await rig.openai.chat.completions.create(
                    model="m", messages=ASK, tools=tools, stream=True, stream_options={"include_usage": True}
                )
            ]
            (call,) = [c for chunk in chunks for choice in chunk.choices for c in choice.delta.tool_calls or []]
            assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "tool_calls"
            assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 10
            assert call.function is not None
            found = {"name": call.function.name, "arguments": call.function.arguments}
            message: Any = {"role": "assistant", "tool_calls": [{"id": call.id, "type": "function", "function": found}]}
            call_id = call.id
        else:
            answer = await rig.openai.chat.completions.create(model="m", messages=ASK, tools=tools)
            message = answer.choices[0].message
            assert message.reasoning_content == "hm" and message.content is None
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.usage is not None and answer.usage.prompt_tokens == len(rig.asked[0].prompt_ids)
            call_id = message.tool_calls[0].id
            # What clients add to the history does not count.
            message = message.model_dump() | {"provider_specific_fields": {"x": 1}}

        history = [*ASK, message, {"role": "tool", "tool_call_id": call_id, "content": "3"}]
        answer = await rig.openai.chat.completions.create(model="m", messages=history, tools=tools)
        assert answer.choices[0].message.content == "it is 3" and answer.choices[0].finish_reason == "stop"
        one_sequence(rig, 2)

    run(chat, scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_the_anthropic_sdk(chat: ChatTokenizer, stream: bool) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["<think>\nhm\n</think>\n\nwell " + CALL, "it is 3"]
        asked: dict[str, Any] = {"model": "m", "system": "be brief", "tools": CLAUDE_TOOLS, "max_tokens": 100}
        user = {"role": "user", "content": "add 1 and 2"}
        count = await rig.anthropic.messages.count_tokens(
            model="m",
            system="be brief",
            tools=CLAUDE_TOOLS,
            messages=[user],
        )
        if stream:
            async with rig.anthropic.messages.stream(**asked, messages=[user]) as events:
                answer = await events.get_final_message()
        else:
            answer = await rig.anthropic.messages.create(**asked, messages=[user])
        assert [block.type for block in answer.content] == ["thinking", "text", "tool_use"]
        assert answer.stop_reason == "tool_use" and answer.content[2].input == {"a": 1, "b": 2}
        assert answer.usage.input_tokens == count.input_tokens == len(rig.asked[0].prompt_ids)

        result = {"type": "tool_result", "tool_use_id": answer.content[2].id, "content": "3"}
        history = [user, {"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
        answer = await rig.anthropic.messages.create(**asked, messages=history)
        assert answer.content[0].text == "it is 3" and answer.stop_reason == "end_turn"
        one_sequence(rig, 2)

    run(chat, scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_loop_of_the_responses_api(chat: ChatTokenizer, stream: bool) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["<think>\nhm\n</think>\n\n" + CALL, "it is 3"]
        tools: Any = [{"type": "function", **TOOLS[0]["function"]}]
        history: list[Any] = [{"role": "user", "content": "add 1 and 2"}]
        asked: dict[str, Any] = {"model": "m", "instructions": "be brief", "tools": tools}
        if stream:
            async with rig.openai.responses.stream(**asked, input=history) as events:
                kinds = [event.type async for event in events]
                answer = await events.get_final_response()
            assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
            assert "response.output_item.added" in kinds and "response.function_call_arguments.delta" in kinds
        else:
            answer = await rig.openai.responses.create(**asked, input=history)
        reasoning, call = answer.output
        assert reasoning.type == "reasoning" and call.type == "function_call"

        history += [call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
        answer = await rig.openai.responses.create(**asked, input=history)
        assert answer.output_text == "it is 3" and answer.status == "completed"
        one_sequence(rig, 2)

    run(chat, scene)


def test_siblings_limits_and_stop_texts(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["one", "two", "a long answer of many words", "say: END more"]
        create = rig.openai.chat.completions.create
        answer = await create(model="m", messages=ASK, n=2)
        assert [choice.message.content for choice in answer.choices] == ["one", "two"]
        answer = await create(model="m", messages=ASK, max_completion_tokens=3)
        assert answer.choices[0].finish_reason == "length" and answer.usage is not None
        assert answer.usage.completion_tokens == 3
        answer = await create(model="m", messages=ASK, stop=["END"])
        assert answer.choices[0].message.content == "say: "
        assert [model.id async for model in rig.openai.models.list()] == ["fresco"]
        assert len(rig.session.forest.sequences()) == 4

    run(chat, scene)


def test_what_would_falsify_training_is_overridden_or_refused(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["one"]
        create = rig.openai.chat.completions.with_raw_response.create
        raw = await create(model="m", messages=ASK, temperature=0.2, top_p=0.5)
        assert raw.headers["x-fresco-overridden"] == "temperature, top_p"
        assert (rig.asked[0].temperature, rig.asked[0].top_p) == (1.0, 1.0)

        picture = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
        refused: list[tuple[dict[str, Any], str]] = [
            ({"logit_bias": {"1": 5}}, "logit_bias changes what is sampled"),
            ({"response_format": {"type": "json_object"}}, "response_format.type='json_object' forces tokens"),
            ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "add"}}}, "forces one tool"),
            ({"messages": picture}, r"messages\[0\].content: parts of type 'image_url' are not read"),
            ({"n": 1000}, "n=1000: a whole number from 1 to 64 is wanted"),
            ({"messages": [*ASK, {"role": "assistant", "content": "so"}]}, "the last message is the assistant's"),
        ]
        for fields, why in refused:
            with pytest.raises(openai.BadRequestError, match=why):
                await rig.openai.chat.completions.create(**({"model": "m", "messages": ASK} | fields))
        assert len(rig.asked) == 1

    run(chat, scene)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required_is_left_to_the_model_and_named(chat: ChatTokenizer, stream: bool) -> None:
    """So smolagents and pydantic-ai ask."""

    async def scene(rig: Rig) -> None:
        rig.says = [CALL, CALL, CALL]
        tools: Any = TOOLS
        asked: dict[str, Any] = {"model": "m", "stream": stream}
        create = rig.openai.chat.completions.with_raw_response.create
        raw = [await create(messages=ASK, tools=tools, tool_choice="required", **asked)]
        create = rig.openai.responses.with_raw_response.create
        function: Any = {"type": "function", **TOOLS[0]["function"]}
        raw += [await create(input="hi", tools=[function], tool_choice="required", **asked)]
        create = rig.anthropic.messages.with_raw_response.create
        any_tool: Any = {"type": "any"}
        raw += [await create(messages=ASK[1:], tools=CLAUDE_TOOLS, tool_choice=any_tool, max_tokens=9, **asked)]
        assert [each.headers["x-fresco-overridden"] for each in raw] == ["tool_choice"] * 3

    run(chat, scene)


HALVES = [
    (CALL.replace("2", r'"\ud83d"'), {"a": 1, "b": "\ufffd"}),
    (CALL.replace('"add"', r'"add\ud83d"'), {"a": 1, "b": 2}),
    (CALL.replace("2", "NaN"), None),  # no JSON, so no call
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("says", "arguments"), HALVES)
def test_half_an_emoji_in_a_call_is_answered_and_counted(
    chat: ChatTokenizer, says: str, arguments: dict[str, Any] | None, stream: bool
) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = [says] * 3
        function = {"type": "function", **TOOLS[0]["function"]}
        bodies: dict[str, dict[str, Any]] = {
            "chat/completions": {"messages": ASK, "tools": TOOLS},
            "responses": {"input": "hi", "tools": [function]},
            "messages": {"messages": ASK[1:], "tools": CLAUDE_TOOLS, "max_tokens": 99},
        }
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {rig.endpoint.api_key}"}) as http:
            for path, body in bodies.items():
                url = f"{rig.endpoint.base_url}/v1/{path}"
                async with http.post(url, json=body | {"stream": stream}) as answer:
                    text = (await answer.read()).decode()
                assert answer.status == 200 and "event: error" not in text, (path, text)
        turns = rig.session.forest.turns
        assert [[json.loads(call.arguments) for call in turn.message.calls] for turn in turns if turn.message] == [
            [arguments] if arguments else []
        ] * 3
        assert rig.session.forest.mender.count == (3 if arguments else 0)

    run(chat, scene)


def test_half_an_emoji_of_a_client_is_replaced_and_counted(chat: ChatTokenizer) -> None:
    """In a text, in what a tool answered, and within the JSON of a call's arguments."""

    async def scene(rig: Rig) -> None:
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": r'{"a": "\ud83d"}'}}
        history = [
            {"role": "user", "content": "half \ud83d"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "\ude00", "tool_call_id": "c1"},
        ]
        data = json.dumps({"messages": history, "model": "\ud83d"})
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {rig.endpoint.api_key}"}) as http:
            url = f"{rig.endpoint.base_url}/v1/chat/completions"
            async with http.post(url, data=data) as answer:
                assert answer.status == 200 and (await answer.json())["model"] == "\ufffd"
            async with http.post(url, data=data.replace('"model"', '"x": NaN, "model"')) as answer:
                assert answer.status == 400 and "the body is no JSON" in await answer.text()
        read = chat.turn_text(rig.asked[0].prompt_ids.tolist())
        assert read.count("\ufffd") == 3 and rig.session.forest.mender.count >= 3

    run(chat, scene)


def test_nothing_is_reachable_without_the_tickets_key(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        for name, key in ("5", "wrong"), ("6", rig.endpoint.api_key), ("", rig.endpoint.api_key):
            base = rig.endpoint.base_url.rsplit("/", 1)[0] + f"/{name}/v1"
            client = openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=0)
            with pytest.raises((openai.AuthenticationError, openai.NotFoundError)):
                await client.chat.completions.create(model="m", messages=ASK)
            with pytest.raises((openai.AuthenticationError, openai.NotFoundError)):
                await client.models.list()
        assert rig.endpoint.base_url.startswith("http://127.0.0.1:") and not rig.asked

    run(chat, scene)


def test_bodies_that_are_none(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        headers = {"Authorization": f"Bearer {rig.endpoint.api_key}"}
        async with aiohttp.ClientSession(headers=headers) as http:
            for body in BODIES:
                for path in ("chat/completions", "responses", "messages", "messages/count_tokens"):
                    async with http.post(f"{rig.endpoint.base_url}/v1/{path}", data=body) as answer:
                        assert answer.status == 400, (path, body[:40], await answer.text())
        assert not rig.asked

    run(chat, scene)


def test_tools_that_are_nested_too_deep_are_refused_and_no_others(chat: ChatTokenizer) -> None:
    """At 950 levels they are read, and what is done with them runs into Python's limit."""

    async def scene(rig: Rig) -> None:
        async def status(schema: dict[str, Any], field: str = "tools") -> list[int]:
            function = {"name": "add", "parameters": schema}
            tools = [{"type": "function", "function": function}, {"type": "function", **function}]
            tools += [{"name": "add", "input_schema": schema}] * 2
            found = []
            for path, tool in zip(
                ("chat/completions", "responses", "messages", "messages/count_tokens"), tools, strict=True
            ):
                body = {"messages": ASK[1:], "input": "hi", "max_tokens": 5, field: [tool]}
                async with http.post(f"{rig.endpoint.base_url}/v1/{path}", json=body) as answer:
                    found.append(answer.status)
            return found

        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {rig.endpoint.api_key}"}) as http:
            for depth in range(100, 950, 50):
                assert await status(nested(depth)) == [400] * 4, depth
            assert await status(nested(900), "tool_choice") == await status(nested(900), "stop") == [400] * 4
            assert not rig.asked
            assert await status(nested(60)) == [200] * 4

    run(chat, scene, tokens=1000)


def test_a_client_that_goes_away_ends_its_generation(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.hold.clear()
        asked = asyncio.create_task(rig.openai.chat.completions.create(model="m", messages=ASK))
        while not rig.asked:
            await asyncio.sleep(0.005)
        asked.cancel()
        while not rig.session.abandoned:
            await asyncio.sleep(0.005)
        await rig.session.close()
        assert rig.session.sampler.tokens_generated == 2 and not rig.session.forest.sequences()

    run(chat, scene)


def test_an_sdk_that_times_out_and_asks_again_joins(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.session._grace_s = 30
        rig.hold.clear()
        rig.says = ["one"]
        client = openai.AsyncOpenAI(**rig.endpoint.openai, max_retries=5, timeout=2)
        asked = asyncio.create_task(client.chat.completions.create(model="m", messages=ASK))
        while not rig.session.joined:
            await asyncio.sleep(0.005)
        rig.hold.set()
        assert (await asked).choices[0].message.content == "one"
        assert len(rig.asked) == 1
        one_sequence(rig, 1)

    run(chat, scene)

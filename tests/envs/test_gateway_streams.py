"""Streams as the SDKs read them: text arrives while the turn is sampled, and nothing that was sent is taken back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from rollout.episodes.tokenizer import ChatTokenizer
from tests.envs.test_gateway import ASK, CALL, Rig, chat, one_sequence, run

__all__ = ["chat"]
SAID = "<think>\nwhy é ∑ not\n</think>\n\nthe ∑ <b>is</b> é \N{GRINNING FACE} "
TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


async def chat_pieces(rig: Rig, **fields: Any) -> AsyncIterator[tuple[str, str]]:
    """(reasoning, content) of each chunk."""
    create = rig.openai.chat.completions.create
    async for chunk in await create(model="m", messages=ASK, stream=True, **fields):
        delta = chunk.choices[0].delta
        yield getattr(delta, "reasoning_content", None) or "", delta.content or ""


async def responses_pieces(rig: Rig) -> AsyncIterator[tuple[str, str]]:
    async for event in await rig.openai.responses.create(model="m", input="add 1 and 2", stream=True):
        kind = event.type.removeprefix("response.")
        yield tuple(event.delta if kind == wanted else "" for wanted in ("reasoning_text.delta", "output_text.delta"))  # type: ignore[misc]


async def anthropic_pieces(rig: Rig) -> AsyncIterator[tuple[str, str]]:
    message: Any = {"role": "user", "content": "add 1 and 2"}
    asked = await rig.anthropic.messages.create(model="m", max_tokens=100, messages=[message], stream=True)
    async for event in asked:
        delta = event.delta if event.type == "content_block_delta" else None
        yield getattr(delta, "thinking", ""), getattr(delta, "text", "")


@pytest.mark.parametrize("pieces", [chat_pieces, responses_pieces, anthropic_pieces])
def test_text_arrives_while_the_turn_is_sampled(chat: ChatTokenizer, pieces: Any) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = [SAID + CALL]
        rig.hold.clear()  # the turn does not end before its text has been read
        reasoning, content, arrived = "", "", 0
        async for thought, said in pieces(rig):
            reasoning += thought
            content += said
            arrived += bool(thought or said)
            assert "\ufffd" not in reasoning + content and "<tool" not in content and "think>" not in content
            if content.endswith("\N{GRINNING FACE}"):
                rig.hold.set()

        assert (reasoning, content) == ("why é ∑ not", "the ∑ <b>is</b> é \N{GRINNING FACE}")
        assert arrived > 10
        one_sequence(rig, 1)

    run(chat, scene)


def test_no_part_of_a_stop_text_is_sent_and_the_engine_is_told_of_it(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["a END. b END of it", "ENd"]
        assert "".join([said async for _, said in chat_pieces(rig, stop=["END of", "never"])]) == "a END. b "
        assert rig.asked[0].stop == ["END of", "never"] and rig.asked[0].stream
        assert "".join([said async for _, said in chat_pieces(rig, stop=["END"])]) == "ENd"
        (first, _) = rig.session.forest.sequences()
        assert chat.decode(first.token_ids[first.loss_mask != 0].tolist()).endswith("END of")

    run(chat, scene)


def test_what_was_streamed_is_gone_on_with(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = [SAID, "3"]
        content = "".join([said async for _, said in chat_pieces(rig)])
        history: list[Any] = [*ASK, {"role": "assistant", "content": content}, {"role": "user", "content": "so?"}]
        await rig.openai.chat.completions.create(model="m", messages=history)
        one_sequence(rig, 2)

    run(chat, scene)


def test_siblings_are_streamed_side_by_side(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["one", "two"]
        said = ["", ""]
        async for chunk in await rig.openai.chat.completions.create(model="m", messages=ASK, n=2, stream=True):
            for choice in chunk.choices:
                said[choice.index] += choice.delta.content or ""
        assert sorted(said) == ["one", "two"]

    run(chat, scene)


def test_a_failure_before_the_first_text_is_a_status_and_after_it_an_event(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = [""]
        rig.error = "too long"
        with pytest.raises(openai.InternalServerError, match="too long"):
            _ = [piece async for piece in chat_pieces(rig)]

        rig.says = ["some text of it"]
        read = ""
        with pytest.raises(openai.APIError, match="too long"):
            async for _, said in chat_pieces(rig):
                read += said
        assert read.startswith("some text")
        with pytest.raises(openai.BadRequestError, match="logit_bias"):
            _ = [piece async for piece in chat_pieces(rig, logit_bias={"1": 5})]

    run(chat, scene)


def test_who_goes_away_in_the_middle_ends_the_generation(chat: ChatTokenizer) -> None:
    async def scene(rig: Rig) -> None:
        rig.says = ["some text of it"]
        rig.hold.clear()
        stream = await rig.openai.chat.completions.create(model="m", messages=ASK, stream=True)
        async for chunk in stream:
            if chunk.choices[0].delta.content:
                break
        await stream.close()
        while not rig.session.abandoned:
            await asyncio.sleep(0.005)
        await rig.session.close()
        assert not rig.session.forest.sequences()

    run(chat, scene)

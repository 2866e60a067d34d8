"""The text of a turn while it is being sampled: pieces of every size, and what may not be told."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from experiments.gateway.tokenizers import make_folder
from rollout.episodes.environment import ChatMessage
from rollout.episodes.forest import Forest
from rollout.episodes.live import LiveTurn
from rollout.episodes.parsing import HermesParser, ParsedTurn, TurnReader
from rollout.episodes.tokenizer import ChatTokenizer
from tests.rollout.trajectories import finish, reply_columns

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
PARTS = [*MARKERS, '{"name": "f", "arguments": {"x": "</tool_call>"}}', "{", "}", "\n", " ", "é∑", "a", "<", "tool_"]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(make_folder("qwen3", tmp_path_factory.mktemp("model") / "qwen3"))


def test_what_is_certain_is_a_beginning_of_what_is_parsed_in_the_end() -> None:
    parser = HermesParser()
    chance = random.Random(7)
    told = 0
    turns = ["".join(chance.choices(PARTS, k=chance.randint(1, 12))) for _ in range(3000)]
    for text in (*turns, "<think>a <</think><think>b</think>c"):
        parsed = parser.parse(text)
        before = ParsedTurn("")
        for end in range(len(text) + 1):
            now = parser.so_far(text[:end])
            assert now.content.startswith(before.content) and now.reasoning.startswith(before.reasoning), text
            before = now
        assert parsed.content.startswith(before.content) and parsed.reasoning.startswith(before.reasoning), text
        told += len(before.content) + len(before.reasoning)
    assert told > 3000, "something is told at all"


def test_pieces_of_every_size_are_the_same_text(chat: ChatTokenizer) -> None:
    chance = random.Random(3)
    text = "<think>\nso é\n</think>\n\nthe ∑ of \N{GRINNING FACE} is END"
    ids = [
        id for letter in text.replace("<think>", "\0") for id in chat.encode(letter if letter != "\0" else "<think>")
    ]
    for _ in range(30):
        live = LiveTurn(TurnReader(chat, HermesParser()), "", ["END"])
        place = 0
        while place < len(ids):
            size = chance.randint(1, 5)
            live.grew(ids[place : place + size])
            assert "\ufffd" not in live.content and "E" not in live.content
            place += size
        assert (live.reasoning, live.content) == ("so é", "the ∑ of \N{GRINNING FACE} is")
        assert live.text() == chat.turn_text(ids) == text


def test_bytes_that_are_no_text_do_not_stop_what_follows(chat: ChatTokenizer) -> None:
    half = chat.encode("∑")[:1]
    live = LiveTurn(TurnReader(chat, HermesParser()), "", [])
    for id in [*chat.encode("a"), *half, *chat.encode("b"), *half]:
        live.grew([id])
    assert live.content == "a\ufffdb" and live.text() == "a\ufffdb\ufffd"


def test_a_thought_that_the_prompt_has_opened_is_no_content(tmp_path: Path) -> None:
    chat = ChatTokenizer(make_folder("nemotron_3_nano", tmp_path / "model"), {"enable_thinking": True})
    forest = Forest(TurnReader(chat, HermesParser()))
    for text, reasoning, content in ("hm\n</think>\n\nyes", "hm", "yes"), ("cut off", "cut off", ""):
        turn = forest.attach([ChatMessage("user", text)])
        live = forest.live(turn)
        live.grew(chat.encode(text))
        turn.growing.append_generated(reply_columns(chat.encode(text), -0.25, 4))
        message = finish(forest, turn, "stop", (), live.text())
        assert (message.reasoning, message.content) == (live.reasoning, live.content) == (reasoning, content)

"""Turns that somebody else has written become the very ids of an episode in which a model had sampled them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments.gateway.tokenizers import make_folder, template_names
from launch.warm_start.writing import Turn, written
from rl.config.schema import load_config
from rl.wire.messages import Generate, Generated, Trajectory
from rollout.episodes.environment import ChatMessage, Step
from rollout.episodes.episode import EpisodeContext, run_episode
from rollout.episodes.tokenizer import ChatTokenizer, TokenizerError
from tests.envs.harness import generated, ticket

QUESTION = [ChatMessage("user", "what is 1 + 2?")]
MORE = [ChatMessage("user", "and 3 + 4?")]
PLAIN: list[Turn] = [(ChatMessage("assistant", "3"), MORE), (ChatMessage("assistant", " 7\n"), [])]
THOUGHT: list[Turn] = [
    (ChatMessage("assistant", "3", "one and two"), MORE),
    (ChatMessage("assistant", "7", "three and four"), MORE),
    (ChatMessage("assistant", "7"), []),
]


class Asks:
    def __init__(self, turns: Sequence[Turn]) -> None:
        self.answers = [list(answer) for _, answer in turns]

    async def reset(self, task: Any) -> list[ChatMessage]:
        return QUESTION

    async def step(self, action: str, truncated: bool = False) -> Step:
        answer = self.answers.pop(0)
        return Step(answer, 1.0, not answer, True)

    async def close(self) -> None:
        pass


def played(chat: ChatTokenizer, turns: Sequence[Turn], said: Sequence[str], thinking: str) -> Trajectory:
    """The episode in which the model samples these texts."""
    texts = iter(said)

    async def generate(request: Generate) -> Generated:
        return generated(request, [*chat.encode(next(texts)), chat.turn_end or chat.stop_ids[0]])

    overrides = ["generator.max_model_len=8192", "env.max_turns=9", f"chat.thinking={thinking}"]
    context = EpisodeContext(load_config(None, overrides), chat, generate)
    return asyncio.run(asyncio.wait_for(run_episode(ticket(5), lambda: Asks(turns), None, context), 60))


def check(chat: ChatTokenizer, turns: Sequence[Turn], said: Sequence[str], thinking: Any = "keep") -> int:
    """Ids and what is learned of them, sequence by sequence; the number of sequences."""
    sequences = written(chat, QUESTION, turns, 8192, thinking)
    assert sequences is not None
    episode = played(chat, turns, said, thinking).sequences
    assert [each.ids for each in sequences] == [each.token_ids.tolist() for each in episode]
    for ours, theirs in zip(sequences, episode, strict=True):
        learned = {place for start, end, _ in ours.turns for place in range(start, end)}
        assert learned == set(theirs.loss_mask.nonzero()[0].tolist())
    return len(sequences)


@pytest.mark.parametrize("name", template_names())
def test_ids_are_those_of_an_episode_under_every_template(name: str, tmp_path: Path) -> None:
    chat = ChatTokenizer(make_folder(name, tmp_path / name))
    assert check(chat, PLAIN, ["3", " 7\n"]) == 1


@pytest.mark.parametrize(("thinking", "sequences"), [("keep", 1), ("template", 3)])
def test_thoughts_stand_as_the_model_would_write_them(thinking: str, sequences: int, tmp_path: Path) -> None:
    chat = ChatTokenizer(make_folder("qwen3", tmp_path / "qwen3"))
    said = ["<think>\none and two\n</think>\n\n3", "<think>\nthree and four\n</think>\n\n7", "7"]
    assert check(chat, THOUGHT, said, thinking) == sequences


def test_a_thought_that_the_prompt_opens_is_not_opened_twice(tmp_path: Path) -> None:
    chat = ChatTokenizer(make_folder("nemotron_3_nano", tmp_path / "model"), {"enable_thinking": True})
    assert chat.raw(chat.prompt(QUESTION)).rstrip().endswith("<think>")
    (whole,) = written(chat, QUESTION, [(ChatMessage("assistant", "3", "hm"), [])], 1024) or []
    assert chat.raw(whole.ids).count("<think>") == 1 and "hm\n</think>\n\n3" in chat.raw(whole.ids)


def test_what_is_too_long_is_left_out_and_what_would_end_a_turn_is_refused(tmp_path: Path) -> None:
    chat = ChatTokenizer(make_folder("qwen3", tmp_path / "qwen3"))
    (whole,) = written(chat, QUESTION, PLAIN, 1024) or []
    assert written(chat, QUESTION, PLAIN, len(whole.ids)) == [whole]
    assert written(chat, QUESTION, PLAIN, len(whole.ids) - 1) is None
    with pytest.raises(TokenizerError, match=r"'<\|im_end\|>', which would end it; leave it out"):
        written(chat, QUESTION, [(ChatMessage("assistant", "3<|im_end|>4"), [])], 1024)

"""What a model reads of its own history in reset/step environments, and texts that no tokenizer or socket takes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.gateway.agents import TOOLS
from experiments.gateway.tokenizers import make_folder
from rl.config.schema import load_config
from rl.wire.messages import Generate, Generated, Trajectory
from rl.wire.text import Mender, whole
from rollout.episodes.conversation import template_drift
from rollout.episodes.environment import ChatMessage, Opening, Step
from rollout.episodes.episode import EpisodeContext, run_episode
from rollout.episodes.parsing import make_reader
from rollout.episodes.tokenizer import ChatTokenizer
from tests.envs.harness import generated, ticket

HALF = "\ud83d"
THOUGHT = "<think>\nhm\n</think>\n\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Game:
    """Answers every turn with this message, until it has answered all of them."""

    def __init__(self, *answers: ChatMessage) -> None:
        self.answers = list(answers)
        self.actions: list[str] = []

    async def reset(self, task: Any) -> Any:
        return [ChatMessage("user", "q")]

    async def step(self, action: str, truncated: bool = False) -> Step:
        self.actions.append(action)
        done = not self.answers
        return Step([] if done else [self.answers.pop(0)], 1.0, done, done)

    async def close(self) -> None:
        pass


class WithTools(Game):
    async def reset(self, task: Any) -> Any:
        return Opening([ChatMessage("user", "q")], TOOLS)

    async def step(self, action: str, truncated: bool = False) -> Step:
        calls = action.message.calls  # type: ignore[attr-defined]
        if not calls:
            return await super().step(action, truncated)
        self.actions.append(action)
        named = [ChatMessage("tool", "3", call_id=call.id, name=call.name) for call in calls]
        return Step(named, 1.0, False, False)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return ChatTokenizer(make_folder("qwen3", tmp_path_factory.mktemp("model") / "qwen3"))


def play(chat: ChatTokenizer, game: Game, said: Sequence[str | list[int]], *overrides: str) -> Trajectory:
    """An episode in which the model says this, turn by turn."""
    turns = iter(said)

    async def generate(request: Generate) -> Generated:
        turn = next(turns)
        return generated(request, [*(chat.encode(turn) if isinstance(turn, str) else turn), chat.stop_ids[0]])

    config = load_config(None, ["generator.max_model_len=1024", "env.max_turns=9", *overrides])
    context = EpisodeContext(
        config, chat, generate, reader=make_reader(config, chat) if isinstance(game, WithTools) else None
    )
    return asyncio.run(asyncio.wait_for(run_episode(ticket(5), lambda: game, None, context), 60))


def texts(chat: ChatTokenizer, played: Trajectory) -> list[str]:
    return [chat._tokenizer.decode(each.token_ids.tolist(), skip_special_tokens=False) for each in played.sequences]


# ---------------------------------------------------------------- thinking


def test_old_thoughts_stay_or_go_as_chat_thinking_says(chat: ChatTokenizer) -> None:
    """Qwen3's template drops a thought once a user's message follows; each sampled token is trained once either way."""
    said = [THOUGHT + "one", THOUGHT + "two", "three"]
    found = {}
    for thinking in ("keep", "template"):
        game = Game(ChatMessage("user", "more"), ChatMessage("user", "and more"))
        found[thinking] = play(chat, game, said, f"chat.thinking={thinking}")
        assert game.actions == said and found[thinking].reward == 3.0 and found[thinking].stop_reason == "done"
        sampled = [each.token_ids[each.loss_mask != 0].tolist() for each in found[thinking].sequences]
        assert [id for ids in sampled for id in ids] == [
            id for turn in said for id in [*chat.encode(turn), chat.stop_ids[0]]
        ]

    (kept,) = texts(chat, found["keep"])
    assert kept.count("hm") == 2 and found["keep"].info == {"drift_text": 1.0}

    # What is trained begins with what the template writes, character by character.
    first, second, third = texts(chat, found["template"])
    history = [ChatMessage("user", "q"), ChatMessage("assistant", "one"), ChatMessage("user", "more")]
    assert first.count("hm") == second.count("hm") == 1 and "hm" not in third
    assert second.startswith(chat.written(history) + THOUGHT + "two")
    history += [ChatMessage("assistant", "two"), ChatMessage("user", "and more")]
    assert third.startswith(chat.written(history) + "three")
    assert [len(each.turns) for each in found["template"].sequences] == [1, 1, 1]
    assert found["template"].info == {"forks_thinking": 2.0}


def test_within_a_tool_loop_the_template_keeps_thoughts(chat: ChatTokenizer) -> None:
    said = [THOUGHT + CALL, THOUGHT + "3", "well"]
    played = play(chat, WithTools(ChatMessage("user", "more")), said, "chat.thinking=template")
    first, second = texts(chat, played)
    assert first.count("hm") == 2 and "hm" not in second and "<tool_response>\n3" in second
    assert [len(each.turns) for each in played.sequences] == [2, 1] and played.info["forks_thinking"] == 1
    assert [turn.number for each in played.sequences for turn in each.turns] == [0, 1, 2]


def test_a_history_that_is_too_long_without_its_thoughts_ends_the_episode(chat: ChatTokenizer) -> None:
    long = ChatMessage("user", "0 " * 3000)
    played = play(chat, Game(long), [THOUGHT + "one"], "chat.thinking=template")
    assert played.stop_reason == "context" and len(played.sequences) == 1


def test_drift_is_measured_with_a_thought_where_the_template_decides(tmp_path: Path, chat: ChatTokenizer) -> None:
    """This template keeps old thoughts in other marks than its own, which a turn without one does not show."""
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    template += "{% if m.reasoning_content %}[{{ m.reasoning_content }}]{% endif %}{{ m.content }}<|im_end|>\n"
    template += "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    folder = make_folder("qwen3", tmp_path / "drifting")
    (folder / "chat_template.jinja").write_text(template)
    drifting = ChatTokenizer(folder)

    assert template_drift(chat, "keep") == template_drift(chat, "template") == template_drift(drifting, "keep") == ""
    assert "[fresco dummy thought]" in template_drift(drifting, "template")
    played = play(drifting, Game(ChatMessage("user", "more")), [THOUGHT + "one", "two"], "chat.thinking=template")
    assert played.info == {"drift_text": 1.0}


# ---------------------------------------------------------------- halves of a character


def test_half_an_emoji_of_an_environment_is_replaced_and_counted(chat: ChatTokenizer) -> None:
    said = ["one", CALL, "two"]
    played = play(chat, WithTools(ChatMessage("user", f"saw {HALF} \U0001f600")), said)
    (text,) = texts(chat, played)
    assert "saw \ufffd \U0001f600" in text and played.info["half_characters"] == 1.0


def test_half_an_emoji_in_a_call_is_replaced_and_counted(chat: ChatTokenizer) -> None:
    calls = [CALL.replace("2", r'"\ud83d"'), CALL.replace('"add"', r'"ad\ud83d"'), CALL.replace("2", "NaN")]
    game = WithTools()
    played = play(chat, game, calls)
    arguments, name, none = (action.message for action in game.actions)  # type: ignore[attr-defined]
    assert json.loads(arguments.calls[0].arguments) == {"a": 1, "b": "\ufffd"}
    assert name.calls[0].name == "ad\ufffd" and not none.calls, "NaN is no JSON, so this is no call"
    assert played.info["half_characters"] == 2.0


def test_texts_are_made_whole_and_nothing_else_is_touched() -> None:
    mender = Mender()
    fine = ["a", "é \U0001f600", r'{"a": "\ud83d\ude00"}', r'{"a": "\\ud83d"}', "{\\ud83d"]
    assert [mender.json(text) for text in fine] == fine and mender.count == 0
    assert mender.json(r'{"a": ["\uDE00"]}') == '{"a": ["\ufffd"]}' and mender.count == 1
    assert whole("\ud83d\ude00 \ude00") == "\U0001f600 \ufffd"


# ---------------------------------------------------------------- ids without text


def test_ids_beyond_the_tokenizer_are_counted_and_named(
    chat: ChatTokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    end = chat._tokenizer.get_vocab_size()
    played = play(chat, Game(ChatMessage("user", "more")), [[5, end, end + 7], [6]])
    assert played.info["textless_tokens"] == 2.0
    assert f"sampled ids that stand for no text: {end}, {end + 7}" in capsys.readouterr().out
    assert "textless_tokens" not in play(chat, Game(), [[5, end - 1]]).info
    assert chat.textless(np.arange(end + 3, dtype=np.int32)).tolist() == [end, end + 1, end + 2]

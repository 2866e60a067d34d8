"""The forest of one ticket: where requests attach, what opens a new root and why, and what is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.gateway.agents import TOOLS
from experiments.gateway.tokenizers import make_folder
from rollout.episodes.environment import ChatMessage, ToolCall
from rollout.episodes.forest import Forest, ForestTurn, RequestRefused
from rollout.episodes.parsing import HermesParser, PlainParser, TurnReader, check_parser
from rollout.episodes.tokenizer import ChatTokenizer, TokenizerError
from tests.rollout.trajectories import finish, reply_columns

SYSTEM = ChatMessage("system", "be brief")
USER = ChatMessage("user", "add 1 and 2")
MORE = ChatMessage("user", "and 3")
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("templates")
    return lambda name: base / name if (base / name).exists() else make_folder(name, base / name)


@pytest.fixture(scope="module")
def chat(folders: Callable[[str], Path]) -> ChatTokenizer:
    return ChatTokenizer(folders("qwen3"))


def letters(chat: ChatTokenizer, text: str, *, ended: bool = True) -> list[int]:
    """The text in more tokens than a tokenizer would choose, markers apart."""
    ids: list[int] = []
    while text:
        size = text.index(">") + 1 if text.startswith("<") else 1
        ids += chat.encode(text[:size])
        text = text[size:]
    return [*ids, chat.stop_ids[0]] if ended else ids


def answer(forest: Forest, turn: ForestTurn, ids: list[int], **how: object) -> ChatMessage:
    turn.growing.append_generated(reply_columns(ids, -0.25, 4))
    message = finish(forest, turn, str(how.get("reason", "stop")), how.get("stop", ()))  # type: ignore[arg-type]
    forest.answered(turn, message)
    return message


def forest_of(chat: ChatTokenizer, **options: object) -> Forest:
    return Forest(TurnReader(chat, HermesParser()), **options)  # type: ignore[arg-type]


def trained(forest: Forest) -> list[list[int]]:
    return [sequence.token_ids[sequence.loss_mask != 0].tolist() for sequence in forest.sequences()]


def test_a_loop_with_tools_is_one_sequence_of_sampled_ids(chat: ChatTokenizer) -> None:
    forest = forest_of(chat)
    ids = letters(chat, "<think>\nhm\n</think>\n\nwell " + CALL)
    first = answer(forest, forest.attach([SYSTEM, USER], TOOLS), ids)
    assert (first.content, first.reasoning) == ("well", "hm")
    assert [(call.name, call.arguments) for call in first.calls] == [("add", '{"a": 1, "b": 2}')]

    # The client drops the reasoning and writes the arguments again.
    (call,) = first.calls
    rewritten = replace(first, reasoning="", calls=(ToolCall(call.id, "add", '{"b":2, "a":1}'),))
    tool = ChatMessage("tool", "3", call_id=call.id, name="add")
    turn = forest.attach([SYSTEM, USER, rewritten, tool], TOOLS)
    text = chat._tokenizer.decode(turn.read.tolist(), skip_special_tokens=False)
    assert text == "\n<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    answer(forest, turn, letters(chat, "3"))

    (sequence,) = forest.sequences()
    assert trained(forest) == [ids + letters(chat, "3")]
    assert not forest.forks and len(sequence.turns) == 2 and sequence.shared == 0
    assert (sequence.policy_version[sequence.loss_mask != 0] == 4).all()


def test_answers_side_by_side_share_their_history_which_is_trained_once(chat: ChatTokenizer) -> None:
    forest = forest_of(chat)
    first = answer(forest, forest.attach([USER]), letters(chat, "one"))
    turns = [forest.attach([USER, first, MORE]) for _ in range(3)]
    for place, turn in enumerate(turns):
        answer(forest, turn, letters(chat, "abc"[place]))

    sequences = forest.sequences()
    assert [len(sequence.turns) for sequence in sequences] == [2, 1, 1]
    end = sequences[0].turns[0].end
    assert [sequence.shared for sequence in sequences] == [0, end, end]
    for sequence in sequences[1:]:
        np.testing.assert_array_equal(sequence.token_ids[:end], sequences[0].token_ids[:end])
        assert not sequence.loss_mask[:end].any() and (sequence.policy_version[:end] == -1).all()
    assert trained(forest) == [letters(chat, "one") + letters(chat, "a"), letters(chat, "b"), letters(chat, "c")]


def other(*messages: ChatMessage) -> list[ChatMessage]:
    return list(messages)


def test_what_repeats_nothing_opens_a_root_for_a_reason(chat: ChatTokenizer) -> None:
    forest = forest_of(chat)
    first = answer(forest, forest.attach([SYSTEM, USER], TOOLS), letters(chat, "one"))
    asked = {
        "edited": other(SYSTEM, USER, replace(first, content="two"), MORE),
        "compacted": other(SYSTEM, ChatMessage("user", "so far: 3")),
        "subagent": other(ChatMessage("user", "look for files")),
    }
    for reason, messages in asked.items():
        turn = forest.attach(messages, TOOLS)
        assert turn.parent is None and forest.forks == {reason: 1}, reason
        answer(forest, turn, letters(chat, reason))
        forest.forks.clear()

    assert forest.attach([SYSTEM, USER, first, MORE], []).parent is None and forest.forks == {"tools": 1}
    turn = forest.attach([SYSTEM, USER, replace(first, reasoning="never thought"), MORE], TOOLS)
    assert turn.parent is None
    assert forest.forks["edited"] == 1
    assert trained(forest) == [letters(chat, text) for text in ("one", "edited", "compacted", "subagent")]


def test_a_bridge_that_is_refused_opens_a_root(folders: Callable[[str], Path]) -> None:
    """Gemma strips what is between the turn and its end: a system message in between is refused by the template."""
    chat = ChatTokenizer(folders("gemma"))
    forest = Forest(TurnReader(chat, PlainParser()))
    first = answer(forest, forest.attach([USER]), letters(chat, "one"))
    with pytest.raises(RequestRefused, match="refuses messages of roles"):
        forest.attach([USER, first, ChatMessage("system", "now"), MORE])

    chat = ChatTokenizer(folders("glm4moe"))
    forest = Forest(TurnReader(chat, PlainParser()))
    turn = forest.attach([USER])
    user, observation = chat.stop_ids[:2]
    answer(forest, turn, [*letters(chat, "one", ended=False), observation])
    turn = forest.attach([USER, forest.turns[0].message, MORE])  # it ended as if a tool were to answer
    assert turn.parent is None and forest.forks == {"bridge": 1} and user != observation


def test_thinking_follows_the_template_if_told_so(chat: ChatTokenizer) -> None:
    for thinking, roots in ("keep", 0), ("template", 1):
        forest = forest_of(chat, thinking=thinking)
        first = answer(forest, forest.attach([USER]), letters(chat, "<think>\nhm\n</think>\n\none"))
        turn = forest.attach([USER, first, MORE])
        assert forest.forks["thinking"] == roots
        assert ("hm" in chat._tokenizer.decode(turn.context.tolist())) == (thinking == "keep")
        answer(forest, turn, letters(chat, "two"))
        assert forest.drift() == ({"text": 1} if thinking == "keep" else {"none": 2})


def test_a_stop_text_cuts_the_turn_where_it_ends(chat: ChatTokenizer) -> None:
    forest = forest_of(chat)
    message = answer(forest, forest.attach([USER]), letters(chat, "say: END and more"), stop=["END"], reason="length")
    assert message.content == "say: "
    assert trained(forest) == [letters(chat, "say: END", ended=False)]
    assert forest.turns[0].finish_reason == "stop"

    turn = forest.attach([USER, message, MORE])
    assert turn.parent is forest.turns[0]
    assert turn.read[0] == chat.turn_end  # the template's end of the turn, which was not sampled


def test_what_makes_no_sense_is_refused(chat: ChatTokenizer) -> None:
    forest = forest_of(chat, limit=30)
    for messages, why in (
        ([], "there is none"),
        ([ChatMessage("wizard", "x")], "role='wizard'"),
        ([USER, ChatMessage("assistant", "so")], "the last message is the assistant's"),
        ([ChatMessage("user", "long " * 30)], "the context is full"),
    ):
        with pytest.raises(RequestRefused, match=why):
            forest.attach(messages)
    assert not forest.forks and not forest.turns


def test_a_turn_that_was_given_to_nobody_is_not_trained(chat: ChatTokenizer) -> None:
    forest = forest_of(chat)
    lost = forest.attach([USER])
    lost.growing.append_generated(reply_columns(letters(chat, "lost"), -0.5, 4))
    finish(forest, lost, "stop")
    answer(forest, forest.attach([USER]), letters(chat, "kept"))
    assert trained(forest) == [letters(chat, "kept")]


# ---------------------------------------------------------------- parsers


def test_arguments_nested_too_deep_for_python_are_text(chat: ChatTokenizer) -> None:
    """A parser in another process has a stack of its own, and may read what is too deep for this one."""
    call = ToolCall("c", "add", '{"a":' * 5000 + "1" + "}" * 5000)
    history = [ChatMessage("user", "q"), ChatMessage("assistant", calls=(call,)), ChatMessage("tool", "r", call_id="c")]
    forest = forest_of(chat)
    answer(forest, forest.attach(history), letters(chat, "3"))
    assert forest.drift().total() == 1


def test_hermes_reads_calls_and_leaves_the_rest() -> None:
    parser = HermesParser()
    two = parser.parse(CALL + "\n" + CALL.replace("1", "7"))
    assert two.content == "" and [arguments for _, arguments in two.calls] == ['{"a": 1, "b": 2}', '{"a": 7, "b": 2}']
    for broken in ("<tool_call>\n{broken}\n</tool_call>", '<tool_call>{"name": 3}</tool_call>', "<tool_call>[]"):
        assert parser.parse(broken).content == broken and not parser.parse(broken).calls
    assert parser.parse("hm</think>\n\nyes").content == "hm</think>\n\nyes", "nothing has opened a thought"
    assert parser.parse("<think>\nunfinished").reasoning == "unfinished"
    deep = "<tool_call>" + '{"name": "x", "arguments": ' + "[" * 50_000 + "}</tool_call>"
    assert parser.parse(deep).content == deep


def test_a_thought_behind_text_is_reasoning_and_its_calls_are_drafts() -> None:
    parser = HermesParser()
    made = parser.parse(CALL).calls
    behind = parser.parse(f"Well.\n<think>\n{CALL}?\n</think>\nSo: {CALL}")
    assert (behind.content, behind.reasoning, behind.calls) == ("Well.\n\nSo:", f"{CALL}?", made)
    again = parser.parse(f"<think>one </think>Well. <think>two {CALL}</think> Done")
    assert (again.content, again.reasoning, again.calls) == ("Well.  Done", f"one two {CALL}", ())
    across = parser.parse(f'<tool_call>{{"name": <think>}}</tool_call>{CALL}</think>{CALL}')
    assert across.calls == made and CALL in across.reasoning

    for text in (f"Well. <think>{CALL}", f"{CALL} Write <think>, then {CALL}"):
        cut = parser.parse(text)
        assert cut.calls == made * text.startswith(CALL) and cut.content.endswith(CALL) and not cut.reasoning
    quoted = '<tool_call>{"name": "f", "arguments": {"x": "<think>"}}</tool_call>'
    assert parser.parse(quoted + CALL).calls == (("f", '{"x": "<think>"}'), *made)


def test_a_parser_that_does_not_fit_the_template_is_refused(folders: Callable[[str], Path]) -> None:
    check_parser(HermesParser(), ChatTokenizer(folders("qwen3")))
    check_parser(HermesParser(), ChatTokenizer(folders("qwen2_5")))
    check_parser(PlainParser(), ChatTokenizer(folders("llama3")))
    for name in ("llama3_1", "glm4moe", "deepseekv3"):
        with pytest.raises(TokenizerError, match=r"chat\.parser: HermesParser does not read the calls"):
            check_parser(HermesParser(), ChatTokenizer(folders(name)))

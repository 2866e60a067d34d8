"""What a model drafts while it thinks is no answer, no action and no call, in any environment."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from envs.alfworld.environment import parse_action
from envs.answers import tagged
from envs.code.verifier import extract_code
from envs.dataset.rewards import exact
from envs.math.verifier import Verdict, Verifier
from envs.swe.tool_calls import BadCall, ToolCall, parse_calls
from experiments.gateway.tokenizers import make_folder
from rollout.episodes.conversation import Conversation
from rollout.episodes.environment import ChatMessage
from rollout.episodes.parsing import HermesParser
from rollout.episodes.tokenizer import ChatTokenizer

LS = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
SUBMIT = '<tool_call>{"name": "submit", "arguments": {}}</tool_call>'
REMOVE = '<tool_call>{"name": "bash", "arguments": {"command": "rm -rf tests"}}</tool_call>'


@pytest.mark.parametrize(
    "turn",
    [
        f"<think>I could run {REMOVE} but no.</think>\n{LS}",
        f"<think>maybe {SUBMIT}? not yet</think>{LS}",
        "<think>e.g.\n```bash\nrm -rf tests\n```\nno</think>\n```bash\nls\n```",
        f"\n <think>{SUBMIT}</think>\n\n{LS}",
        f"<think>one</think>\n<think>{SUBMIT}</think>\n{LS}",
        f"Let me see. <think>{REMOVE} or {SUBMIT}? no</think>\n{LS}",
        f"{LS} and then\n<think>{SUBMIT}</think> nothing",
        f"<think>one</think> First I look. <think>two {SUBMIT}</think>{LS}",
        f"Well. <think>```bash\n{REMOVE}\n```</think>{LS}",
        "Well. <think>```bash\nrm -rf tests\n```</think>\n```bash\nls\n```",
    ],
)
def test_a_call_in_a_thought_is_not_made(turn: str) -> None:
    calls = parse_calls(turn)
    assert [(call.name, str(call.arguments["command"]).strip()) for call in calls if isinstance(call, ToolCall)] == [
        ("bash", "ls")
    ]
    assert len(calls) == 1


@pytest.mark.parametrize(
    "turn",
    [
        f"<think>maybe {SUBMIT}? hmm",
        f"<think>no {SUBMIT}</think>\nLet me look first.",
        f"<think>one</think><think>two {SUBMIT}",
        f"Let me see. <think>I could {SUBMIT}",
        "Let me see. <think>e.g.\n```submit\n```\n",
        f'<tool_call>{{"name": <think> {SUBMIT} </think>',
    ],
)
def test_only_drafts_are_no_call(turn: str) -> None:
    (call,) = parse_calls(turn)
    assert isinstance(call, BadCall)


def test_a_thought_inside_an_argument_is_text() -> None:
    command = "echo '<think>a</think>' '<think>'"
    (call,) = parse_calls(f'<tool_call>{{"name": "bash", "arguments": {{"command": "{command}"}}}}</tool_call>')
    assert call == ToolCall("bash", {"command": command})


def test_a_marker_inside_an_argument_is_text() -> None:
    (call,) = parse_calls('<tool_call>{"name": "bash", "arguments": {"command": "grep </tool_call> a.py"}}</tool_call>')
    assert call == ToolCall("bash", {"command": "grep </tool_call> a.py"})


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("<think>\\boxed{7}</think> It is \\boxed{7}.", Verdict(True, boxed=True)),
        ("<think>\\boxed{7}</think> It is \\boxed{8}.", Verdict(False, boxed=True)),
        ("<think>It is \\boxed{7}", Verdict(False, boxed=False)),
        ("<think>\\boxed{7}</think> So it is 7.", Verdict(False, boxed=False)),
        ("It is \\boxed{7}. I never wrote <think>.", Verdict(True, boxed=True)),
        ("It is \\boxed{7}. <think>Or \\boxed{8}?</think>", Verdict(True, boxed=True)),
        ("Well. <think>\\boxed{7}</think> It is 7.", Verdict(False, boxed=False)),
    ],
)
def test_a_box_in_a_thought_is_no_answer(response: str, right: Verdict) -> None:
    assert asyncio.run(Verifier().verify("7", response)) == right


def test_tags_actions_code_and_exact_answers_stand_behind_the_thought() -> None:
    assert tagged("<think><answer>1</answer>", "answer") is None
    assert tagged("<think><answer>1</answer></think><answer>2</answer>", "answer") == "2"
    assert parse_action("<think><action>take it</action></think>\n<action>go</action>", "tag") == "go"
    assert parse_action("<think>open it", "line") == ""
    assert extract_code("<think>```python\nx = 1\n```</think>```python\nx = 2\n```") == "x = 2\n"
    assert extract_code("<think>x = 1") is None
    assert exact("<think>5? no</think>4", {"answer": "4"}) == 1.0
    assert exact("<think>4", {"answer": "4"}) == 0.0


def test_a_thought_that_the_prompt_has_opened_comes_with_its_marker(tmp_path: Path) -> None:
    """Else its drafts would look like the answer."""
    folder = make_folder("qwen2_5", tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text().replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
    )

    chat = ChatTokenizer(folder)
    conversation = Conversation(chat, [ChatMessage("user", "how many?")])
    assert conversation.text(*conversation.append_written(chat.encode("perhaps 4"))) == "<think>perhaps 4"


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "-1e999"])
def test_a_call_with_a_number_that_json_cannot_carry_is_content(number: str) -> None:
    turn = HermesParser().parse(f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>')
    assert not turn.calls and number in turn.content

"""Rows of conversations: what is learned of them, and errors that name row and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from envs.chat import ChatFamily, ChatOptions, Imitated
from envs.held_out import seen_in_training
from envs.rows import RowError
from rollout.episodes.environment import ChatMessage

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}


def family(tmp_path: Path, *rows: Any, **options: Any) -> ChatFamily:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return ChatFamily(ChatOptions(source=str(path), **options), seed=0)


@pytest.mark.parametrize(
    ("row", "roles", "first"),
    [
        ({"messages": [USER, ANSWER, USER, ANSWER]}, "user assistant user assistant", 0),
        ({"messages": [{"role": "system", "content": "s"}, USER, ANSWER, USER]}, "system user assistant", 0),
        ({"prompt": "q", "completion": "a"}, "user assistant", 1),
        ({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, "user assistant user assistant", 3),
        ({"prompt": [USER], "completion": "a"}, "user assistant", 1),
    ],
)
def test_the_usual_forms(row: Any, roles: str, first: int, tmp_path: Path) -> None:
    task = family(tmp_path, row).task("train", 0)
    assert isinstance(task, Imitated)
    assert " ".join(each.role for each in task.messages) == roles and task.first == first
    assert task.messages[-1] == ChatMessage("assistant", "a")


def test_a_thought_stands_beside_its_turn(tmp_path: Path) -> None:
    thought = ANSWER | {"reasoning_content": "hm"}
    assert family(tmp_path, {"messages": [USER, thought]}).task("train", 0).messages[1].reasoning == "hm"


@pytest.mark.parametrize("empty", ["source", "eval_source"])
def test_a_file_without_rows_is_named(empty: str, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "full.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    sources = {"source": str(tmp_path / "full.jsonl"), empty: str(tmp_path / "empty.jsonl")}
    with pytest.raises(ValueError, match=r"empty\.jsonl'? has no rows"):
        ChatFamily(ChatOptions(**sources), 0)


def test_the_last_rows_are_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "completion": "a"} for i in range(5)]
    made = family(tmp_path, *rows, eval_count=2)
    assert (made.task_count("train"), made.task_count("eval")) == (3, 2)
    assert made.task("eval", 0).messages[0].content == "q3"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, r"row 1 has no field 'messages' or 'prompt'; it has 'text'"),
        ({"prompt": "q"}, "row 1 has no field 'completion'"),
        ({"messages": "a"}, "field 'messages': it is no list of messages"),
        ({"messages": [USER]}, "no message of the role assistant: there is nothing to learn"),
        ({"messages": []}, "no message of the role assistant"),
        ({"messages": [ANSWER, USER, ANSWER]}, "begins with a turn of the assistant"),
        ({"messages": [USER, ANSWER, ANSWER]}, "messages 2 and 3 are both the assistant's; make one of them"),
        ({"messages": [USER, {"role": "gpt", "content": "a"}]}, "message 2 has role='gpt'; one of system, .*assistant"),
        (
            {"messages": [USER, {"role": "assistant", "content": None}]},
            "message 2 has content='None', which is no text",
        ),
        ({"messages": [USER, ANSWER | {"tool_calls": [{}]}]}, "message 2 has tool_calls, .*; write the call into"),
        ({"messages": [USER, "a"]}, "message 2 is no object"),
        ({"prompt": "q", "completion": 7}, "field 'completion': it is no list of messages.* and no text"),
        ({"prompt": "q", "completion": []}, "field 'completion': no message of the role assistant"),
    ],
)
def test_what_cannot_be_learned_names_row_and_field(row: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RowError, match=message):
        family(tmp_path, row)


def test_the_same_rows_elsewhere_are_the_same_data_and_known_when_they_are_held_out(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    rows = [{"prompt": f"q{i}", "completion": "a"} for i in range(5)]
    here, there = family(tmp_path, *rows), family(tmp_path / "b", *rows, eval_source=str(tmp_path / "rows.jsonl"))
    assert list(here.data()) == list(there.data())
    (seen,) = seen_in_training(there, 5)
    assert seen.share == 1.0

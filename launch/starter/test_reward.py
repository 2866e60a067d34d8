"""The reward pays for every right answer, and for nothing else: `pytest` in this folder says so in a second."""

import json
from pathlib import Path

from reward import right

ROWS = [json.loads(line) for line in Path(__file__).with_name("rows.jsonl").read_text().splitlines()]


def test_the_right_answer_of_every_row_earns_one() -> None:
    assert all(right(row["answer"], row) == 1 for row in ROWS)


def test_nothing_and_the_question_itself_earn_less() -> None:
    for row in ROWS:
        assert right("", row) == 0
        assert right(row["prompt"], row) < 1

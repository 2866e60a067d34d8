"""Answers, the verifier's processes, and the sources of problems. Each trap of math-verify has its case."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.math.answers import MAX_ANSWER_CHARS, Symbolic, judge, last_box
from envs.math.datasets import Source, gold_answer, load_problems
from envs.math.environment import INSTRUCTION, MathFamily, MathOptions
from envs.math.problems import Problem
from envs.math.verifier import Verdict, Verifier
from envs.rows import RowError


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed {5}", "5"),
        ("the answer is 42", None),
        ("\\boxed{5} or \\boxed{3", None),  # the last box is what counts, and it is not closed
        ("\\boxed 5", None),
        ("\\boxed{" * 2000, None),
    ],
)
def test_last_box(text: str, answer: str | None) -> None:
    assert last_box(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42"),
        ("42", " 42. "),
        ("42", "042"),
        ("42", "42.0"),
        ("1234", "1,234"),
        ("1234", "1\\,234"),
        ("1,234", "1234"),
        ("18", "\\$18"),
        ("5", "x=5"),
        ("x=5", "5"),
        ("5\\text{ cm}", "5"),
        ("45", "45^\\circ"),
        ("0.5", "\\frac12"),
        ("\\frac{1}{2}", "0.5"),
        ("-\\frac12", "\\dfrac{-1}{2}"),
        ("50\\%", "50 \\%"),
        ("10000000000", "1e10"),
        ("\\text{(A)}", "A"),
        ("\\text{Evelyn}", "Evelyn"),
        ("11_2", "11_{2}"),
        ("\\left(1,2\\right)", "(1, 2)"),
        ("(1,3]", "x\\in(1,3]"),
        ("2\\pi r", "2 \\pi r"),
        ("-7", "−7"),
    ],
)
def test_right(gold: str, answer: str) -> None:
    assert judge(gold, answer) is True


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "43"),
        ("42", ""),
        ("12", "1 2"),
        ("42", "4,2"),
        ("3.14", "3.14159"),
        ("0", "0.0000001"),
        ("42", "12+30"),
        ("42", "\\frac{84}{2}"),
        ("\\frac{1}{2}", "\\frac{2}{4}"),
        ("120", "5!"),  # restatements
        ("50\\%", "50"),
        ("50", "50\\%"),
        ("0.5", "50\\%"),
        ("50\\%", "0.5"),
        ("5", "5\\text{ million}"),
        ("5\\text{ million}", "5"),
        ("5", "5\\text{ or }6"),
        ("5", "\\text{not }5"),
        ("5", "5,6"),
        ("5", "4=5"),
        ("x=5", "y=5"),
        ("\\sqrt{2}", "1=\\sqrt{3}=\\sqrt{2}"),
        ("\\sqrt{2}", "\\sqrt{2}\\text{ is wrong}"),
        ("(1,2)", "[1,2]"),
        ("(1,2)", "\\{1,2\\}"),
        ("(1,2)", "2,1"),
        ("(1,2]", "[1,2)"),
        ("11_2", "11"),
        ("1001_2", "1001_{3}"),
        ("3:4", "\\frac34"),
        ("Evelyn", "nylevE"),
        ("\\text{(A)}", "B"),
        ("1<x\\le3", "(1,3]"),  # the last is right and lost: forms must agree
        ("x", "x" * (MAX_ANSWER_CHARS + 1)),
    ],
)
def test_wrong(gold: str, answer: str) -> None:
    assert judge(gold, answer) is False


@given(gold=st.integers(-20, 200), answer=st.text("0123456789.,eE+-*/^!%{}()x= \\", max_size=12))
def test_a_number_is_matched_by_a_written_number_only(gold: int, answer: str) -> None:
    verdict = judge(str(gold), answer)
    assert isinstance(verdict, bool)  # decided here: no worker
    assert not (verdict and set(answer) & set("*/^!%(")), "something to compute was accepted"


SYMBOLIC = [
    ("2\\sqrt{3}", "\\sqrt{12}", True),
    ("x^2+1", "1+x^2", True),
    ("10^{10}", "1e10", True),
    ("1,2", "2,1", True),
    ("\\frac{\\pi}{2}", "\\pi/2", True),
    ("10e", "1e10", False),
    ("2\\sqrt{3}", "3.464102", False),  # an approximation
    ("\\pi", "3.14159", False),
    ("x^2+1", "y^2+1", False),
    ("(3,1)", "(1,3)", False),
    ("\\sqrt{2}", "\\sqrt{2},\\sqrt{3}", False),
    ("x+y=1", "2=2", False),
    ("\\sqrt{2}", "\\frac{1}{0}", False),
    ("2^{10}", "((((((((((((((", False),
    ("\\sqrt{2}", "9^{9^{9^{9^9}}}", False),
]


def test_workers_judge_survive_and_are_replaced() -> None:
    async def scenario() -> None:
        verifier = Verifier(workers=1, deadline_s=3)
        try:
            assert await verifier.verify("42", "\\boxed{41}") == Verdict(False, boxed=True)
            assert await verifier.verify("42", "42") == Verdict(False, boxed=False)
            assert [worker.pid for worker in verifier.pool.workers] == [None]  # the fast path starts nothing
            for gold, answer, right in SYMBOLIC:
                assert isinstance(judge(gold, answer), Symbolic)
                verdict = await verifier.verify(gold, f"\\boxed{{{answer}}}")
                assert verdict.correct is right, (gold, answer, verdict)

            asked = verifier.symbolic
            await verifier.verify(*("2\\sqrt{3}", "\\boxed{\\sqrt{12}}"))
            assert verifier.symbolic == asked == len(SYMBOLIC)  # known from before
            (worker,) = verifier.pool.workers
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
            hung = await verifier.verify("2\\sqrt{5}", "\\boxed{\\sqrt{20}}")
            assert hung == Verdict(False, boxed=True, unverifiable=True) and worker.restarts == 1
            assert worker.pid is None
        finally:
            await asyncio.wait_for(verifier.stop(), 5)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("He has 40+2 = <<40+2=42>>42.\n#### 42", "42"),
        ("so $x=\\boxed{3}$, hence \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        (" 7 ", "7"),
    ],
)
def test_gold_answers(text: str, gold: str) -> None:
    assert gold_answer(text) == gold


def write(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_jsonl_and_parquet(tmp_path: Path) -> None:
    rows = [{"q": "one?", "a": 1}, {"q": "two?", "a": "#### 2"}]
    expected = [Problem("one?", "1"), Problem("two?", "2")]
    fields = {"question_field": "q", "answer_field": "a"}
    assert load_problems(Source(write(tmp_path / "p.jsonl", *rows), **fields)) == expected
    table = pyarrow.table({"q": ["one?", "two?"], "a": ["1", "#### 2"], "other": [0, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    assert load_problems(Source(str(tmp_path / "p.parquet"), **fields)) == expected
    with pytest.raises(RowError, match=r"no column 'question'; it has 'q', 'a', 'other'"):
        load_problems(Source(str(tmp_path / "p.parquet")))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "?"}, r"row 2 has no field 'answer'; it has 'question'"),
        ({"question": "?", "answer": None}, r"row 2, field 'answer': None is not a text"),
        ({"question": "?", "answer": "#### "}, r"row 2, field 'answer': no answer after"),
        ({"question": "?", "answer": "so \\boxed{1"}, r"row 2, field 'answer': no answer after"),
        ({"question": "?", "answer": "why " * 200}, r"row 2, field 'answer': 799 characters"),
        ([1], r"line 2 is not an object"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: object, message: str) -> None:
    source = write(tmp_path / "p.jsonl", {"question": "?", "answer": "1"}, row)
    with pytest.raises(RowError, match=message):
        load_problems(Source(source))


def test_held_out_rows(tmp_path: Path) -> None:
    source = write(tmp_path / "p.jsonl", *({"question": f"{n}?", "answer": n} for n in range(10)))
    family = MathFamily(MathOptions(source=source, eval_count=3, tasks=5), seed=0)
    assert (family.task_count("train"), family.task_count("eval")) == (5, 3)
    assert [family.task("eval", index).answer for index in range(3)] == ["7", "8", "9"]
    with pytest.raises(IndexError):
        family.task("train", 5)
    with pytest.raises(RowError, match="leaves none to train on"):
        MathFamily(MathOptions(source=source), seed=0)


def test_one_turn() -> None:
    async def scenario() -> None:
        family = MathFamily(MathOptions(system_prompt="Be brief.", instruction=INSTRUCTION), seed=3)
        problem = family.task("train", 0)
        assert problem == MathFamily(MathOptions(), seed=3).task("train", 0)
        environment = family.make()
        system, user = await environment.reset(problem)
        assert system.content == "Be brief." and user.content == f"{problem.question}\n{INSTRUCTION}"
        step = await environment.step(f"\\boxed{{{problem.answer}}}")
        assert (step.reward, step.done, step.messages) == (1.0, True, [])
        assert (await environment.step("no")).info == {"correct": 0.0, "boxed": 0.0, "unverifiable": 0.0}

    asyncio.run(scenario())

"""Answers, the verifier's processes, and the sources of problems. Each trap of a parser of LaTeX has its case."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import psutil
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.math.answers import MAX_ANSWER_CHARS, Symbolic, judge, last_box, typed
from envs.math.arithmetic import ArithmeticProblem
from envs.math.datasets import Source, gold_answer, load_problems
from envs.math.environment import INSTRUCTION, MathFamily, MathOptions
from envs.math.problems import Problem
from envs.math.verifier import Verdict, Verifier
from envs.rows import RowError
from envs.workers.pool import Worker
from envs.workers.process import RequestLost, WorkerHung


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} or rather \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("\\boxed{\\boxed{7}}", "7"),
        ("\\boxed {5}", "5"),
        ("the answer is 42", None),
        ("\\boxed{5}, in \\boxed{} as asked", "5"),
        ("\\boxed{5}. I put it in a \\boxed.", "5"),
        ("\\boxed{5} stands in \\boxed{...}", "5"),
        ("\\boxed{5} or \\boxed{3", None),  # the last box is what counts, and it is not closed
        ("\\boxed 5", None),
        ("\\boxed{" * 2000, None),
    ],
)
def test_last_box(text: str, answer: str | None) -> None:
    assert last_box(text) == answer


CHOICES_OF_A = [
    "A",
    "(A)",
    "A.",
    "A)",
    "{A}",
    "\\left(A\\right)",
    "(\\text{A})",
    *(
        f"\\{command}{{{text}}}"
        for command in ("text", "textbf", "mathrm", "mbox")
        for text in ("A", "(A)", " (A) ", "A.")
    ),
]


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
        ("90", "90°"),
        ("2\\pi", "2π"),
        ("90^\\circ", "90"),
        ("x\\le 3", "x≤3"),
        ("\\big(1,2\\big)", "(1,2)"),
        ("\\emptyset", "\\varnothing"),
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}"),
        *((gold, answer) for gold in ("A", "(A)", "\\text{(A)}", "\\textbf{A}") for answer in CHOICES_OF_A),
    ],
)
def test_right(gold: str, answer: str) -> None:
    assert judge(gold, answer) is True


UNREAD = [
    "\\approx 7", "\\approxeq 7", "≈ 7", "\\sim 7", "\\equiv 7", "\\cong 7", "\\to 7", "\\Rightarrow 7", "\\iff 7",
    "\\lor 7", "\\mid 7", "\\ldots", "\\ldots 7", "\\cdots", "...", "'", "^\\circ", "^{\\dagger}", "?", "; 7",
    "\\bmod 7", "\\phantom{7}", "\\bullet 7", "\\checkmark", "\\tag{7}", "+C",
]  # fmt: skip
"""A lenient parser reads nothing of most of these; each changes what is said."""


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
        *(
            ("A", answer)
            for answer in ("a", "B", "AB", "A,B", "\\text{(a)}", "\\text{(A) or (B)}", "\\text{(A)(B)}", "2")
        ),
        *(("\\sqrt{2}", f"\\sqrt2 {more}") for more in UNREAD),
        *(("\\sqrt{2}", f"7 {relation} \\sqrt2") for relation in ("\\approx", "=", "\\to", "≈")),
        ("x^2+1", "x^2+1\\approx 7"),
        ("f(x)", "f'(x)"),
        ("f'(x)", "f(x)"),
        ("x", "\\bar{x}"),
        ("x", "x^{T}"),
        ("2A", "2a"),
        ("\\pi r^2", "\\pi R^2"),
        ("\\gamma", "\\Gamma"),
        ("aB", "Ab"),
        ("i", "I"),
        ("E", "e"),
        ("AB", "BA"),
        ("\\angle ABC", "\\angle ACB"),
        ("\\sin 1", "\\sin 1^\\circ"),
        ("x=1,y=2", "2,1"),
        ("\\{1,2\\}", "\\{\\{1\\},\\{2\\}\\}"),
        ("\\{\\{1\\},\\{2\\}\\}", "\\{1,2\\}"),
        ("\\mathbb{R}", "R"),
        ("(10,1)", "(\\binom52,1)"),  # restatements, too
        ("10,-1", "\\binom52,e^{i\\pi}"),
        ("\\{120,2\\}", "\\{5!,2\\}"),
        ("-1", "e^{i\\pi}"),
        ("\\frac13", "0.333333333333"),
        ("x^2+\\frac13", "x^2+0.3333333333333333333"),
        ("\\frac{\\pi}{3}", "0.33333333333333333333\\pi"),
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
    ("\\frac{\\pi}{3}", "0.333333333\\pi", False),
    ("(\\frac13,2)", "(0.333333333,2)", False),
    ("(\\frac12,2)", "(0.5,2)", True),
    ("1.5\\pi", "\\frac{3\\pi}{2}", True),
    ("3,-3", "\\pm 3", True),
    ("x^2+1", "x^2-1", False),
    ("\\frac{\\pi}{6}", "30^\\circ", False),
    ("(2,\\infty)", "(2, +\\infty)", True),
    ("x=\\pm 3", "3,-3", True),
    ("1\\pm\\sqrt2", "1-\\sqrt2, 1+\\sqrt2", True),
    ("x>2", "2<x", True),
    ("\\tan x", "\\frac{\\sin x}{\\cos x}", True),
    ("f(x)=2x+1", "1+2x", True),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{bmatrix}1\\\\2\\end{bmatrix}", True),
    ("\\sin 30^\\circ", "\\sin(30^\\circ)", True),
    ("\\pm\\sqrt2", "\\sqrt2", False),
    ("x>2", "x\\ge 2", False),
    ("\\sqrt{2}", "\\sqrt2 \\ne 7", False),
    ("\\sqrt{2}", "\\sqrt2 \\cdot 7", False),
    ("(-\\infty,1)\\cup(2,\\infty)", "(-\\infty,1)", False),
    ("(3,1)", "(1,3)", False),
    ("\\sqrt{2}", "\\sqrt{2},\\sqrt{3}", False),
    ("x+y=1", "2=2", False),
    ("\\sqrt{2}", "\\frac{1}{0}", False),
    ("2^{10}", "((((((((((((((", False),
    ("\\sqrt{2}+\\sqrt{3}", "\\sqrt{5+2\\sqrt{7}}", False),
]


def test_workers_judge_survive_and_are_replaced() -> None:
    async def scenario() -> None:
        verifier = Verifier(workers=1)
        try:
            assert await verifier.verify("42", "\\boxed{41}") == Verdict(False, boxed=True)
            assert await verifier.verify("42", "42") == Verdict(False, boxed=False)
            assert [worker.pid for worker in verifier.pool.workers] == [None]  # the fast path starts nothing
            for gold, answer, right in SYMBOLIC:
                verdict = await verifier.verify(gold, f"\\boxed{{{answer}}}")
                assert verdict.correct is right, (gold, answer, verdict)

            asked = verifier.symbolic
            await verifier.verify(*("2\\sqrt{3}", "\\boxed{\\sqrt{12}}"))
            needed = [each for each in SYMBOLIC if isinstance(judge(*each[:2]), Symbolic)]
            assert verifier.symbolic == asked == len(needed) > 5  # known from before
        finally:
            await asyncio.wait_for(verifier.stop(), 60)

    asyncio.run(scenario())


def slow(cubes: int) -> tuple[str, str]:
    """A right answer that takes half a CPU second with 4 cubes, and 4 with 6."""
    expanded = "((a+b+c)^{3}+3(a+b+c)^{2}d+3(a+b+c)d^{2}+d^{3})"
    return f"(a+b+c+d)^{{{3 * cubes}}}", f"{expanded}^{{{cubes}}}"


async def starve(worker: Worker[Symbolic, bool], seconds: float) -> None:
    """Stop it in the middle of its work, as a loaded machine does, and let it go on after `seconds`."""
    process = psutil.Process(worker.pid)
    before = process.cpu_times().user
    while process.cpu_times().user == before:
        await asyncio.sleep(0.002)

    process.suspend()
    await asyncio.sleep(seconds)
    process.resume()


def test_a_verdict_depends_on_the_work_and_not_on_the_load() -> None:
    async def scenario() -> None:
        verifier = Verifier(workers=1, cpu_s=6.0)
        try:
            await verifier.verify("\\sqrt{2}", "\\boxed{2}")
            starving = asyncio.create_task(starve(verifier.pool.workers[0], seconds=6.5))
            gold, answer = slow(4)
            assert await verifier.verify(gold, f"\\boxed{{{answer}}}") == Verdict(True, boxed=True)
            assert starving.done(), "it was not starved"
            await starving
        finally:
            await asyncio.wait_for(verifier.stop(), 60)

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [slow(6)[1], "9^{9^{9^{9^9}}}"])
def test_an_answer_that_needs_too_much_is_no_verdict_and_judged_anew(answer: str) -> None:
    """Whether Python could interrupt it or only the kernel can."""

    async def scenario() -> None:
        verifier = Verifier(workers=1, cpu_s=0.1)
        try:
            for asked in (1, 2):
                with pytest.raises(RequestLost, match="used up its CPU time"):
                    await verifier.verify(slow(6)[0], f"\\boxed{{{answer}}}")
                assert verifier.symbolic == asked
        finally:
            await asyncio.wait_for(verifier.stop(), 60)

    asyncio.run(scenario())


def test_a_worker_without_any_cpu_time_fails_the_ticket_and_is_no_verdict() -> None:
    async def scenario() -> None:
        verifier = Verifier(workers=1, hang_s=15)
        try:
            await verifier.verify("\\sqrt{2}", "\\boxed{2}")
            (worker,) = verifier.pool.workers
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
            with pytest.raises(WorkerHung, match="did not answer in 15 s"):
                await verifier.verify("2\\sqrt{5}", "\\boxed{\\sqrt{20}}")
            assert (await verifier.verify("2\\sqrt{5}", "\\boxed{\\sqrt{20}}")).correct
        finally:
            await asyncio.wait_for(verifier.stop(), 60)

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
        ({"question": "?", "answer": None}, r"row 2, field 'answer': None is no answer; give the row one"),
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
        assert isinstance(problem, ArithmeticProblem)
        environment = family.make()
        system, user = await environment.reset(problem)
        assert system.content == "Be brief." and user.content == f"{problem.question}\n{INSTRUCTION}"
        step = await environment.step(f"\\boxed{{{problem.answer}}}")
        assert (step.reward, step.done, step.messages) == (1.0, True, [])
        verdict = {"correct": 0.0, "boxed": 0.0, "cut_off": 0.0}
        kind = f"success_{problem.kind}"
        assert (await environment.step("no")).info == verdict | {"invalid_share": 1.0, kind: 0.0}

    asyncio.run(scenario())


TYPES = [
    ("42", "number"),
    ("1{,}000", "number"),
    ("12\\%", "percentage"),
    ("[0,1)", "interval"),
    ("(0,\\infty)", "interval"),
    ("[0,1]\\cup\\{2\\}", "union"),
    ("\\{1,2\\}", "set"),
    ("100, 200", "list"),
    ("(1,2)", "tuple"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "matrix"),
    ("2\\sqrt3", "expression"),
    ("x+y=1", "equation"),
    ("x>2", "inequality"),
    ("5\\text{ cm}", "unit"),
    ("5\\text{ lakh}", "text"),
    ("2024-01-05", "text"),
]


@pytest.mark.parametrize(("gold", "kind"), TYPES)
def test_a_gold_answer_shows_its_type(gold: str, kind: str) -> None:
    assert typed(gold).kind == kind


@pytest.mark.parametrize(
    ("gold", "asked", "answer", "right"),
    [
        ("1,2", "ordered list", "1, 2", True),
        ("1,2", "ordered list", "2, 1", False),
        ("(x-1)(x+1)", "same form", "x^2-1", False),
        ("(x-1)(x+1)", "same form", "(x+1)(x-1)", True),
        ("x^2-1", "expression, same form", "-1+x^2", True),
        ("x^2-1", "expression, same form", "(x+1)(x-1)", False),
        ("(1,2)", "interval", "(1,2)", True),
        ("\\text{even}", "text", "Even", True),
    ],
)
def test_the_data_may_say_the_type_and_the_form(gold: str, asked: str, answer: str, right: bool) -> None:
    assert judge(gold, answer, asked) is right


def test_a_row_may_say_the_type(tmp_path: Path) -> None:
    rows = [{"question": "?", "answer": "1,2", "type": "ordered list"}, {"question": "?", "answer": "x"}]
    source = write(tmp_path / "p.jsonl", *rows)
    assert [each.asked for each in load_problems(Source(source, type_field="type"))] == ["ordered list", ""]
    family = MathFamily(MathOptions(source=source, type_field="type", eval_count=0), seed=0)
    assert family.answer_types() == {"ordered list": ["1,2"], "expression": ["x"]}

    for wrong, message in (("vector", "'vector' is no type"), ("matrix", "'1' is read as number, not as matrix")):
        write(tmp_path / "p.jsonl", {"question": "?", "answer": 1, "type": wrong})
        with pytest.raises(RowError, match=rf"row 1, field 'type': {message}"):
            load_problems(Source(source, type_field="type"))


def test_an_answer_that_is_cut_off_is_marked() -> None:
    async def scenario() -> None:
        environment = MathFamily(MathOptions(), seed=3).make()
        await environment.reset(Problem("?", "\\frac12"))
        said = ["\\boxed{\\frac12}", "so \\boxed{\\frac1", "so"]
        marks = [(await environment.step(each)).info["cut_off"] for each in said]
        assert [*marks, (await environment.step("so", truncated=True)).info["cut_off"]] == [0, 1, 0, 1]

    asyncio.run(scenario())

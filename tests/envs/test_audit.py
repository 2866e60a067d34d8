"""The verifier's own audit: seeded faults of verifiers are found within three steps, and sound ones raise no alarm."""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import pytest

from envs.audit.auditor import ANSWERS, RECENT, SHARE, Auditor, Change, Tally, audit, variants
from envs.audit.changes import of_latex, value_of
from envs.check.checks import SHORT
from envs.check.run import check_environment
from envs.math.answers import typed
from envs.math.arithmetic import problem
from envs.math.problems import Problem
from rl.config.alarms import AlarmsConfig
from rl.config.schema import load_config
from rl.observe.alarms import Alarms
from rollout.broker.assembly import info_means
from tests.envs.playing import with_family
from tests.envs.test_math_pairs import PAIRS
from tests.envs.test_math_pairs import accepted as proven

Verifier = Callable[[str, str], bool]
accepted = cache(proven)
WORDS = [problem("train", index, 0).answer for index in range(400)]
ROWS = [(pair["gold"], pair["answer"]) for pair in PAIRS if pair["equal"]] + [(word, word) for word in WORDS]
TOUCHED = 0.1
"""The least share of rewarded answers about which a seeded fault is wrong, in some variant."""


def _number(text: str) -> float | None:
    value = value_of(text.strip(" $"))
    return None if value is None else float(value)


def numbers(same: Callable[[float, float], bool]) -> Verifier:
    """A verifier that compares numbers in its own way, and is sound elsewhere."""

    def verify(gold: str, answer: str) -> bool:
        one, other = _number(gold), _number(answer)
        return accepted(gold, answer) if one is None or other is None else same(one, other)

    return verify


def reading(change: Callable[[str], str]) -> Verifier:
    """A verifier that drops or changes a part of both before it compares."""
    return lambda gold, answer: accepted(gold, answer) or change(gold) == change(answer)


def without(pattern: str) -> Verifier:
    return reading(lambda text: re.sub(pattern, "", text))


def members(text: str) -> list[str]:
    return [part.strip() for part in text.strip("(){}[]\\ ").split(",")]


def strict(refused: str) -> Verifier:
    """A verifier that refuses what has this in it, and the gold has not."""
    return lambda gold, answer: accepted(gold, answer) and not (re.search(refused, answer) and gold != answer)


FAULTS: dict[str, Verifier] = {
    "rounds to six digits": numbers(lambda gold, answer: abs(gold - answer) < 1e-6),
    "rounds to whole numbers": numbers(lambda gold, answer: round(gold) == round(answer)),
    "within one percent": numbers(lambda gold, answer: abs(gold - answer) <= 0.01 * abs(gold)),
    "within one": numbers(lambda gold, answer: abs(gold - answer) <= 1),
    "without the sign": numbers(lambda gold, answer: abs(gold) == abs(answer)),
    "powers of ten are one": numbers(lambda g, a: g == a or g == 10 * a or a == 10 * g),
    "at least the gold": numbers(lambda gold, answer: answer >= gold),
    "at most the gold": numbers(lambda gold, answer: answer <= gold),
    "any number": numbers(lambda gold, answer: True),
    "the gold is in the answer": lambda gold, answer: accepted(gold, answer) or gold in answer,
    "the first digit decides": numbers(lambda gold, answer: f"{abs(gold)}"[0] == f"{abs(answer)}"[0]),
    "a beginning is enough": lambda gold, answer: accepted(gold, answer) or answer.startswith(gold),
    "signs are dropped": without(r"[-+]"),
    "digits are dropped": without(r"\d"),
    "points are dropped": without(r"[.]|0+$"),
    "all that is no letter is dropped": without(r"[^A-Za-z]"),
    "letters count, in any order": reading(lambda text: "".join(sorted(text))),
    "spaces are refused": strict(r"^ "),
    "dollar signs are refused": strict(r"\$"),
    "another spelling is refused": strict(r"\\dfrac|\.0$"),
}


class Family:
    """Rows whose rewarded answers are audited with a verifier that may have a fault."""

    audit_s = 0.0

    def __init__(self, verifier: Verifier) -> None:
        self.verifier = verifier

    async def changes(self, task: Problem, response: str, dice: random.Random) -> list[Change]:
        return variants(task, "", of_latex(response, typed(task.answer).value.kind, task.answer))

    async def judged(self, change: Change) -> bool:
        return self.verifier(change.task.answer, change.response)


def audited(verifier: Verifier, steps: int, seed: int = 0, cpu: float = 1e9) -> tuple[list[str], Auditor]:
    """What alarms were raised in so many steps, each with many more rewarded answers than are audited."""
    told: list[str] = []

    async def run() -> Auditor:
        alarms = Alarms(AlarmsConfig(), lambda name, detail: told.append(f"{name}: {detail}"))
        auditor = Auditor(Family(verifier), ANSWERS, alarms, lambda: cpu)
        dice = random.Random(seed)
        rewarded = [row for row in ROWS if verifier(*row)]
        for step in range(steps):
            for gold, answer in dice.choices(rewarded, k=40):
                auditor.offer(step, Problem("", gold), answer)
            while auditor._task is not None and not auditor._task.done():
                await asyncio.sleep(0)
        await auditor.stop()
        return auditor

    return told, asyncio.run(run())


def touches(verifier: Verifier, gold: str, answer: str) -> bool:
    made = of_latex(answer, typed(gold).value.kind, gold)
    return any(verifier(gold, changed) is not equal for _, equal, changed in made)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_verifier_is_found_within_three_steps(fault: str) -> None:
    rewarded = [row for row in ROWS[::3] if FAULTS[fault](*row)]
    assert sum(touches(FAULTS[fault], *row) for row in rewarded) >= TOUCHED * len(rewarded)
    told, auditor = audited(FAULTS[fault], steps=3)
    assert told and told[0].startswith("verifier-wrong: of a rewarded answer, "), fault
    assert auditor.tally.answers <= 3 * ANSWERS == RECENT


def test_a_sound_verifier_raises_no_alarm() -> None:
    told, auditor = audited(accepted, steps=40)
    assert told == [] and auditor.tally.accepted == 0 and auditor.tally.answers == 40 * ANSWERS


def test_what_is_changed_is_certain_for_numbers() -> None:
    """By exact fractions, without the verifier."""
    dice = random.Random(1)
    for _ in range(300):
        value = Fraction(dice.randint(-200, 200), dice.choice([1, 2, 3, 7, 10, 1000]))
        text = str(value) if dice.random() < 0.5 else f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
        for what, equal, changed in of_latex(text, "number"):
            other = value_of(changed.strip(" $"))
            assert other is not None and (other == value) is equal, (text, what, changed)


@pytest.mark.parametrize(
    ("kind", "gold"),
    [
        ("unit", "5\\text{ kilograms}"),
        ("unit", "5\\text{ kg}"),
        ("expression", "0x^2+3"),
        ("list", "1,234, 5,678"),
        ("tuple", "(1,234, 5)"),
        ("number", "0"),
        ("list", "2, 2"),
        ("interval", "(-\\infty, 3]"),
    ],
)
def test_nothing_wrong_is_called_right_nor_right_wrong(kind: str, gold: str) -> None:
    """By the verifier, which the written pairs hold to be sound."""
    for what, equal, changed in of_latex(gold, kind):
        assert proven(gold, changed) == equal, (what, changed)


@pytest.mark.parametrize(
    ("gold", "wrong"),
    [
        ("B", "C"),
        ("\\mathrm{B}", "\\mathrm{C}"),
        ("x=5", "x=6"),
        ("f(x)=2x", "f(x)=2x+1"),
        ("\\left[0,2\\right)", "[0,2]"),
        ("(-\\infty,2)\\cup(3,\\infty)", "(-\\infty,2)\\cup[3,\\infty)"),
        ("2^{1009}", "2^{1010}"),
        ("e^{-2}", "e^{-1}"),
        ("10^{-3}", "10^{-2}"),
    ],
)
def test_what_a_verifier_may_drop_is_tried_whatever_the_notation(gold: str, wrong: str) -> None:
    made = of_latex(gold, typed(gold).value.kind)
    assert wrong in [changed for _, equal, changed in made if not equal]


def test_words_between_members_stay_in_their_place() -> None:
    gold = "3, 4\\text{ and }5"
    assert all(proven(gold, changed) for _, equal, changed in of_latex(gold, "list") if equal)


def test_the_audit_keeps_within_its_share_and_is_told_once() -> None:
    _, auditor = audited(accepted, steps=5, cpu=1e-9)
    assert auditor.tally.answers <= 1 or auditor.tally.seconds <= SHARE * 1e-9

    _, auditor = audited(FAULTS["any number"], steps=1)
    news = auditor.news()
    assert 0 < news["audit/false_accept"] < 1 and news["audit/false_refuse"] == 0 and auditor.news() == {}
    assert info_means([news, {}, {"x": 1.0}]).keys() == {"audit/false_accept", "audit/false_refuse", "env/x"}


def test_a_verifier_that_takes_long_is_asked_seldom() -> None:
    def slow(gold: str, answer: str) -> bool:
        time.sleep(0.002)
        return accepted(gold, answer)

    told, auditor = audited(slow, steps=3, cpu=1.0)
    assert told == [] and auditor.tally.answers < 3 * ANSWERS
    spent, each = auditor.tally.seconds, auditor.tally.seconds / auditor.tally.answers
    assert spent <= SHARE * 1.0 + 8 * each  # the last one may take longer than the mean


def test_what_the_host_does_wrong_ends_the_audit_and_not_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    def broken(gold: str, answer: str) -> bool:
        raise OSError("no sandbox")

    rows = ROWS[:]
    try:
        ROWS[:] = rows[:1]
        told: list[str] = []

        async def run() -> Auditor:
            auditor = Auditor(
                Family(broken), ANSWERS, Alarms(AlarmsConfig(), lambda *each: told.extend(each)), lambda: 1e9
            )
            auditor.offer(0, Problem("", "5"), "5")
            await asyncio.sleep(0.01)
            return auditor

        auditor = asyncio.run(run())
    finally:
        ROWS[:] = rows
    assert told == [] and "the audit of the verifier ends: OSError: no sandbox" in capsys.readouterr().out
    assert auditor.error is not None


def test_the_check_finds_what_is_rare_and_tells_with_an_interval() -> None:
    config = load_config(None, ["env.name=math", "env.max_turns=1", "env.step_deadline_s=30"])
    page = check_environment(config, SHORT)
    assert page.audit is not None and page.audit.answers == 24 and page.audit.wrong > 60, page.text()
    assert page.audit.accepted == page.audit.refused == 0
    assert re.search(r"0 of \d+ wrong ones accepted \(0\.0% to \d\.\d%\)", page.text())


@pytest.mark.parametrize("name", ["math", "code"])
def test_families_offer_changes_of_their_solutions(name: str) -> None:
    async def use(family: Any) -> Tally:
        total = Tally()
        for index in range(4):
            task = family.task("train", index)
            environment = family.make()
            await environment.reset(task)
            total.add(await audit(family, task, await environment.gold(), random.Random(index)))
        return total

    found = with_family(use, f"env.name={name}")
    assert found.answers == 4 and found.wrong >= 8 and found.equal >= 4, found
    assert found.accepted == found.refused == 0, found.examples

"""What the algebra system raises: over an answer alone it is a zero, else the reward has failed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import sympy

from envs.math import algebra
from envs.math.environment import MathFamily, MathOptions
from envs.math.problems import Problem
from envs.math.reading import read
from rollout.episodes.environment import RewardFailed

GOLD = "\\sqrt{2}+\\sqrt{3}"
NESTED = "\\sqrt{5+2\\sqrt{6}}"
"""The gold's value, which only simplifying shows."""


def fails(*arguments: Any) -> Any:
    raise ZeroDivisionError("polynomial division")


def equal(gold: str, answer: str) -> bool:
    return algebra.equal(read(gold), read(answer))


def test_a_failed_proof_of_the_golds_own_digits_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    assert equal(GOLD, NESTED)
    monkeypatch.setattr(sympy, "simplify", fails)
    with pytest.raises(ZeroDivisionError):
        equal(GOLD, NESTED)
    assert not equal(GOLD, "\\sqrt{5+2\\sqrt{7}}")  # other digits are refused before any proof


def test_what_is_raised_over_the_answer_alone_is_its_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algebra._FUNCTIONS, "sin", fails)
    assert not equal(GOLD, f"\\sin(1)({NESTED})")
    assert not algebra.proportional(read("y-\\sqrt{x}"), read("\\sin(y)-\\sqrt{x}"))


def test_without_digits_a_failed_proof_spares_nobody_a_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown function has no value at any point, so that nothing says that the answer is right."""
    monkeypatch.setattr(sympy, "expand", fails)
    assert not equal("f(x)+\\sqrt{2}", "f(x+1)+\\sqrt{2}")


def test_what_is_raised_over_the_gold_is_a_failure_whatever_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(algebra._FUNCTIONS, "sin", fails)
    with pytest.raises(ZeroDivisionError):
        equal("\\sin(1)", "\\sqrt{2}")
    with pytest.raises(ZeroDivisionError):
        algebra.proportional(read("\\sin(x)-y"), read("\\sqrt{x}-y"))


def test_a_failed_proof_of_an_equation_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    gold = read("y-\\sqrt{x}")
    assert algebra.proportional(gold, read("2y-2\\sqrt{x}"))
    monkeypatch.setattr(sympy, "cancel", fails)
    with pytest.raises(ZeroDivisionError):
        algebra.proportional(gold, read("2y-2\\sqrt{x}"))
    assert not algebra.proportional(gold, read("2y-3\\sqrt{x}"))


def test_a_failure_in_the_worker_masks_the_sample_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = "import sympy\ndef fails(*_):\n    raise ZeroDivisionError('polynomial division')\n"
    (tmp_path / "sitecustomize.py").write_text(f"{broken}sympy.simplify = fails\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")

    async def scenario() -> None:
        family = MathFamily(MathOptions(), seed=0)
        environment = family.make()
        try:
            await environment.reset(Problem("Add the roots of 2 and 3.", GOLD))
            with pytest.raises(RewardFailed, match="math's verifier: ZeroDivisionError: polynomial division"):
                await environment.step(f"\\boxed{{{NESTED}}}")
            assert (await environment.step("\\boxed{\\sqrt{5+2\\sqrt{7}}}")).reward == 0.0
        finally:
            await asyncio.wait_for(family.stop(), 60)

    asyncio.run(scenario())

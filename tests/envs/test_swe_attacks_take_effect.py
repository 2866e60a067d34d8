"""Each attack on the rewards for software engineering earns one from a judge that has no defence against it.

Without this, an attack that has a mistake and does nothing would pass the tests in which attacks earn nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from envs.sandbox import Command, Result
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.runtime import HARNESS
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.checkout_cache import CheckoutCache
from tests.envs import naive_pytest
from tests.envs.repositories import write_files
from tests.envs.sandboxes import sh
from tests.envs.test_swe_attacks import ATTACKS, BUGGY, CHECKS, EDITS, FILES, FIX, LIMITS, TASK, beside_the_tests

JUDGE = Path(naive_pytest.__file__).read_text()
SCRIPTS = EDITS | {name: beside_the_tests(code) for name, code in ATTACKS.items()}


def first_report(result: Result) -> dict[str, object]:
    """Of whoever printed it first; empty where nobody did."""
    for line in result.text().splitlines():
        if line.startswith("{") and '"outcomes"' in line:
            return dict(json.loads(line)["outcomes"])
    return {"no report": "failed"}


def a_test_passes(result: Result) -> bool:
    """Of those that the task wants to see pass: each of them could be a task of its own."""
    outcomes = first_report(result)
    return any(outcomes.get(test) == "passed" for test in TASK.fail_to_pass)


READINGS: dict[str, Callable[[Result], bool]] = {
    "a test passes": a_test_passes,
    "nothing failed": lambda result: "failed" not in first_report(result).values(),
    "exit code": lambda result: result.exit_code == 0,
}
AIMS = {
    "a new helper beside it": "exit code",
    "a signal": "exit code",
    "a report at the end": "exit code",
    "a report of no form": "nothing failed",
    "a report from a child": "nothing failed",
}
"""How the judge must read a run to be deceived, where that is not by a test that passes."""

TRIES = {"other code in the tests": 5}
"""Of an attack whose thread races with the tests, and loses now and then."""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    folder = tmp_path_factory.mktemp("published")
    write_files(FILES | {"vault/core.py": BUGGY}, folder / TASK.instance_id)
    return CheckoutCache(folder / "cache", folder).prepare(TASK, images=False)


def judged(backend: BubblewrapBackend, checkout: Checkout, script: str) -> Result:
    """What is left by the tests in the agent's own sandbox, after its work."""
    checkout, sandbox = open_checkout(backend, checkout, LIMITS)
    sh(sandbox, script)
    job = json.dumps({"site": f"{HARNESS}/site", "files": [CHECKS]})
    result = sandbox.run(Command([checkout.python, "-s", "-c", JUDGE], job.encode(), separate_stderr=True))
    sandbox.close()
    return result


def test_the_judge_tells_right_from_wrong(backend: BubblewrapBackend, checkout: Checkout) -> None:
    right = judged(backend, checkout, FIX)
    wrong = judged(backend, checkout, "true")
    for name, reading in READINGS.items():
        assert reading(right) and not reading(wrong), name


@pytest.mark.parametrize("attack", SCRIPTS)
def test_attacks_take_effect(backend: BubblewrapBackend, checkout: Checkout, attack: str) -> None:
    reading = READINGS[AIMS.get(attack, "a test passes")]
    for _ in range(TRIES.get(attack, 1)):
        result = judged(backend, checkout, SCRIPTS[attack])
        if reading(result):
            return
    pytest.fail(result.text()[-2000:])

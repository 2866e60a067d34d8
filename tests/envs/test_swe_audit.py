"""The audit of tasks with repositories: what certainly does not fix them earns nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from envs.sandbox import Limits
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.swe.audit import changes, without_its_hunk
from envs.swe.checkout import Checkout, open_checkout
from envs.swe.checkout_cache import CheckoutCache
from envs.swe.evaluate import evaluate
from envs.swe.tasks import file_diff
from tests.envs.repositories import FILES, TASK, make_package

BOTH = replace(TASK, fail_to_pass=(*TASK.fail_to_pass, "tests/test_text.py::test_euros"), pass_to_pass=())


def test_changes_of_a_task_are_judged_as_they_must_be(backend: BubblewrapBackend, tmp_path: Path) -> None:
    package = make_package(tmp_path)
    checkout: Checkout = CheckoutCache(tmp_path / "cache", packages={"ledger": package}).prepare(TASK, images=False)
    _, sandbox = open_checkout(backend, checkout, Limits(timeout_s=60, output_bytes=4 << 20))
    try:
        made = changes(BOTH, sandbox, random.Random(0))
    finally:
        sandbox.close()

    assert {change.what for change in made} == {"a file more", "no fix", "another expected literal"}
    for change in made:
        assert evaluate(backend, checkout, change.task, change.response).resolved is change.equal, change.what


def test_only_a_hunk_that_is_alone_is_taken_back() -> None:
    notes = "diff --git a/NEWS b/NEWS\n--- a/NEWS\n+++ b/NEWS\n@@ -1 +1 @@\n-a\n+b\n"
    assert without_its_hunk(TASK.gold_patch + notes) == notes
    assert without_its_hunk(TASK.gold_patch) == ""
    assert without_its_hunk(TASK.gold_patch + TASK.gold_patch.replace("ledger/__init__", "ledger/more")) is None


READS_THE_TEST = """import linecache
import re
import sys


def euros(cents):
    frame = sys._getframe(1)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return re.search("['\\"]([^'\\"]*)['\\"]", line)[1]
"""


@pytest.mark.parametrize("source", [READS_THE_TEST])
def test_answers_taken_from_the_test_itself_earn_nothing(
    backend: BubblewrapBackend, tmp_path: Path, source: str
) -> None:
    """They pass where the tests are counted, and with other literals too, where all must fail."""
    package = make_package(tmp_path)
    checkout = CheckoutCache(tmp_path / "cache", packages={"ledger": package}).prepare(TASK, images=False)
    task = replace(TASK, fail_to_pass=("tests/test_text.py::test_euros",), pass_to_pass=())
    outcome = evaluate(backend, checkout, task, file_diff("ledger/text.py", FILES["ledger/text.py"], source))
    assert outcome.tampered and outcome.reward(partial=True) == 0, outcome

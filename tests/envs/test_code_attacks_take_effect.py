"""Each attack on the rewards for code earns one from a judge that has no defence against it.

Without this, an attack that has a mistake and does nothing would pass the tests in which attacks earn nothing.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from envs.sandbox import Command, Limits, Template
from envs.sandbox.bubblewrap import BubblewrapBackend
from envs.sandbox.runtime import default_runtime
from tests.envs import naive_code
from tests.envs.sandboxes import world_writable
from tests.envs.test_code_attacks import ATTACKS, FUNCTION, PROGRAM

LIMITS = Limits(timeout_s=60, memory_bytes=256 << 20, processes=32, file_bytes=128 << 20)
JUDGE = Path(naive_code.__file__).read_text()
CALLS = tuple((text, right[0]) for text, right in FUNCTION.calls)
TESTS = [
    *(("exec", text, True) for text in FUNCTION.asserts),
    *((kind, *call) for call in CALLS for kind in ("equal", "near", "isclose")),
    *(("lines", *(text.strip() for text in case)) for case in PROGRAM.cases),
    *(("proxy", text, True) for text in FUNCTION.asserts),
]
WRONG = ["def f(n): return n + 1", "def f(n): return None", "def f(n): raise ValueError(n)", "print(int(input()) + 1)"]
READ = {
    "lines printed": ["nothing"],
    "printed verdict": [
        "print a report",
        "write answers before the questions",
        "write a report everywhere",
        "results as a value",
        "true",
        "a thread that outlives",
        "another interpreter",
        "what unpickles to anything",
    ],
    "first answer": ["replace json"],
    "no failure seen": [
        "answers without end",
        # Its json.py, for want of dumps, stops the judge; a Python may have math built in, which no file shadows.
        "files that shadow modules",
        "stop the parent",
        "limit the parent",
        "a list of itself",
        "as deep as can be",
        "as long as can be",
        "without end",
        "a flood",
        "slow",
        "a loop",
        "a fork bomb",
        "a memory bomb",
        "no text",
        "surrogates in an error",
        "no syntax",
        "a null",
        "too deep to parse",
        "no text to compile",
    ],
}
"""How the judge must read its traces to be deceived, where that is not by an exit status."""
AIMS = {attack: reading for reading, attacks in READ.items() for attack in attacks}
UNENDING_S = 1.0
"""How long the judge waits where it takes no answer for no failure."""


def paid(backend: BubblewrapBackend, folder: Path, code: str, reading: str, deadline_s: float) -> bool:
    tests = [test for test in TESTS if (test[0] == "lines") == (reading == "lines printed")]
    if reading in ("first answer", "no failure seen"):
        # Where the function runs elsewhere, neither is written.
        tests = [test for test in tests if test[0] != "proxy"]
    job = {"code": code, "prelude": FUNCTION.prelude, "tests": tests, "reading": reading, "deadline_s": deadline_s}
    sandbox = backend.open(Template(world_writable(folder)), LIMITS)
    argv = [default_runtime().python, "-s", "-c", JUDGE]
    result = sandbox.run(Command(argv, repr(job).encode(), separate_stderr=True))
    sandbox.close()
    return result.text().splitlines()[-1:] == ["paid"]


@pytest.mark.parametrize("reading", naive_code.READINGS)
def test_the_judge_tells_right_from_wrong(backend: BubblewrapBackend, tmp_path: Path, reading: str) -> None:
    programs = reading == "lines printed"
    right = PROGRAM.solution if programs else FUNCTION.solution
    assert paid(backend, tmp_path / "empty", right, reading, 30)
    for wrong in WRONG[3:] if programs else WRONG[:3]:
        assert not paid(backend, tmp_path / "empty", wrong, reading, 30), wrong


@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks_take_effect(backend: BubblewrapBackend, tmp_path: Path, attack: str) -> None:
    reading = AIMS.get(attack, "exit status")
    deadline_s = UNENDING_S if reading == "no failure seen" else 10
    assert paid(backend, tmp_path / "empty", ATTACKS[attack], reading, deadline_s)

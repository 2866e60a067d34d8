"""Which tests a task's rows name, which harness script runs them, and by which names their outcomes are found.

Published rows name tests as SWE-bench's log parsers read them from a runner's output (`swebench/harness/log_parsers`,
https://github.com/SWE-bench/SWE-bench): by pytest's ids, for Django by unittest's descriptions, for SymPy by bare
function names. Only pytest's ids have a file; the files of the others are those that `test_patch` changes, as in
SWE-bench's own test commands.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from envs.swe.harness.apply_diff import is_test_file, shadows_tools
from envs.swe.harness.fresco_report import worst

RunnerName = Literal["pytest", "django", "sympy"]
_REPOSITORIES: dict[str, RunnerName] = {"django/django": "django", "sympy/sympy": "sympy"}
_IMPORT_ROOTS = ("", "src", "lib")
_CHANGED = re.compile(r"^\+\+\+ b/(.+?)\t?$", re.MULTILINE)
_PROGRESS = re.compile(r"^\[\s*\d*%?\]?$")
_OPTION = re.compile(r"^(.*?)\[(/[^/*][^*]*)\]$")
_DESCRIBED = re.compile(r"^(\w+) \(([\w.]+\.\w+)\)$")
_MOUSE_BUTTONS = {"MouseButton.LEFT": "1", "MouseButton.RIGHT": "3"}


@dataclass(frozen=True)
class TestRunner:
    """How the tests of a repository are run in a sandbox."""

    script: str
    """The name of the script in envs/swe/harness."""
    canaries: int
    """Tests of the script's own that must all fail."""
    machinery: tuple[str, ...] = ()
    """The repository's own test tools that no usual name shows, put back like its tests."""
    environment: dict[str, str] = field(default_factory=dict)


RUNNERS: dict[RunnerName, TestRunner] = {
    "pytest": TestRunner("run_tests.py", canaries=6),
    "django": TestRunner(
        "run_django.py",
        canaries=12,
        environment={"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "utf8"},
    ),
    "sympy": TestRunner(
        "run_sympy.py",
        canaries=3,
        machinery=("sympy/testing/", "sympy/utilities/pytest.py", "sympy/utilities/runtests.py"),
        environment={"SYMPY_USE_CACHE": "no", "PYTHONWARNINGS": "ignore::UserWarning,ignore::SyntaxWarning"},
    ),
}


def runner_of(repo: str) -> RunnerName:
    """The runner of a repository whose tests are named without files."""
    return _REPOSITORIES.get(repo, "pytest")


def changed_tests(runner: RunnerName, test_patch: str) -> tuple[str, ...]:
    """The test files that a row's patch leaves there changed, of the forms that the runner takes."""
    paths = [path for path in dict.fromkeys(changed_paths(test_patch)) if path.endswith(".py")]
    if runner == "django":
        return tuple(path for path in paths if path.startswith("tests/") and path.count("/") > 1)
    return tuple(path for path in paths if path.rpartition("/")[2].startswith("test_"))


def files_of(tests: Sequence[str]) -> tuple[str, ...]:
    """The files that pytest's ids begin with; each once."""
    return tuple(dict.fromkeys(test.partition("::")[0] for test in tests if has_file(test)))


def has_file(test: str) -> bool:
    """Whether a test's name begins with its file, as pytest's ids do."""
    return ".py" in test.partition("::")[0]


def is_progress(test: str) -> bool:
    """`[100%]`, which SWE-bench's parsers have taken for a test where pytest's line was broken."""
    return bool(_PROGRESS.match(test))


def changed_paths(patch: str) -> list[str]:
    """The files that a patch leaves there changed."""
    return _CHANGED.findall(patch)


def protected_paths(
    runner: RunnerName, gold_patch: str, test_files: Sequence[str] = (), test_patch: str = ""
) -> list[str]:
    """What a diff cannot change, unless that is what the task is about. It is the runner's machinery, the files that
    the task names or brings, and the folders of such files whose own names do not show that they are tests."""
    named = [*test_files, *changed_paths(test_patch)]
    folders = [f"{path.rpartition('/')[0]}/" for path in test_files if "/" in path and not is_test_file(path)]
    changed = changed_paths(gold_patch)

    def is_the_task(kept: str) -> bool:
        return any(path == kept or (kept.endswith("/") and path.startswith(kept)) for path in changed)

    return [kept for kept in dict.fromkeys([*RUNNERS[runner].machinery, *named, *folders]) if not is_the_task(kept)]


def put_back_of_fix(gold_patch: str) -> str:
    """A file that the true fix changes and no diff may change, as `src/_pytest/python.py`; empty if there is none."""
    changed = changed_paths(gold_patch)
    return next((path for path in changed if shadows_tools(path, _IMPORT_ROOTS)), "")


def must_fail_name(test: str) -> str:
    """The name by which `must_fail` knows a test: the part of pytest's id below the file, without parameters;
    `Class::test_a` of Django's `test_a (module.Class)` or `test_a (module.Class.test_a)`."""
    if has_file(test):
        return test.partition("::")[2].split("[")[0]
    found = _DESCRIBED.match(test)
    if found is None:
        return test
    name, where = found[1], found[2].removesuffix(f".{found[1]}")
    return f"{where.rpartition('.')[2]}::{name}"


def share_passed(outcomes: Mapping[str, str], tests: Sequence[str]) -> float:
    """The share of `tests` that passed; 1 if there are none."""
    return sum(each == "passed" for each in outcomes_of(outcomes, tests)) / len(tests) if tests else 1.0


def outcomes_of(outcomes: Mapping[str, str], tests: Sequence[str]) -> list[str | None]:
    """The outcomes of `tests`, by the names that the harness gave or that SWE-bench's parsers make of them; None: it
    was not run."""
    by_published_name: dict[str, str] = {}
    if any(test not in outcomes for test in tests):
        for name in filter(has_file, outcomes):
            published = as_published(name)
            by_published_name[published] = worst(outcomes[name], by_published_name.get(published, outcomes[name]))

    return [outcomes.get(test, by_published_name.get(test)) for test in tests]


def as_published(test: str) -> str:
    """What SWE-bench's parsers leave of a pytest id: its first word, of a path as parameter the last part.

    They split a line at blanks (`parse_log_pytest`), shorten `[/a/b]` to `[/b]` (`parse_log_pytest_options`), and write
    mouse buttons as numbers (`parse_log_matplotlib`).
    """
    for button, number in _MOUSE_BUTTONS.items():
        test = test.replace(button, number)
    word = test.split(maxsplit=1)[0] if test.strip() else test
    option = _OPTION.match(word)
    if option is None:
        return word
    test, path = option.groups()
    return f"{test}[/{path.rpartition('/')[2]}]"

"""A small real package as a source distribution, with sound, parametrised and flaky tests, and a task made of it."""

from __future__ import annotations

import hashlib
import subprocess
import tarfile
from pathlib import Path

from envs.swe.packages import Package, open_to_all
from envs.swe.tasks import SweTask, file_diff

FILES = {
    "ledger/__init__.py": '''"""Sums of money in cents."""


def split(total, parts):
    """Parts that differ by at most one cent and add up to the total."""
    if parts < 1:
        raise ValueError("parts")
    each, rest = divmod(total, parts)
    return [each + 1 if index < rest else each for index in range(parts)]


def balance(entries):
    total = 0
    for kind, amount in entries:
        if kind == "in":
            total = total + amount
        else:
            total = total - amount
    return total


def overdrawn(entries, limit=0):
    return balance(entries) < -limit
''',
    "ledger/text.py": """def euros(cents):
    sign = "-" if cents < 0 else ""
    return f"{sign}{abs(cents) // 100}.{abs(cents) % 100:02d}"
""",
    "tests/__init__.py": "",
    "tests/conftest.py": """import pytest


@pytest.fixture
def entries():
    return [("in", 500), ("out", 200)]
""",
    "tests/test_ledger.py": """import pytest
from ledger import balance, overdrawn, split


@pytest.mark.parametrize("total,parts,expected", [(10, 3, [4, 3, 3]), (9, 3, [3, 3, 3]), (0, 2, [0, 0])])
def test_split(total, parts, expected):
    assert split(total, parts) == expected


def test_split_needs_parts():
    with pytest.raises(ValueError):
        split(1, 0)


def test_balance(entries):
    assert balance(entries) == 300


def test_overdrawn(entries):
    assert not overdrawn(entries)
    assert overdrawn([("out", 6)], limit=5)
    assert not overdrawn([("out", 5)], limit=5)
""",
    "tests/test_text.py": """import pytest
from ledger.text import euros


def test_euros():
    assert euros(1234) == "12.34"
    assert euros(-5) == "-0.05"


def test_flaky():
    assert hash("a") % 1000 == 0 or hash("b") % 2 == 0


@pytest.mark.xfail
def test_known_to_fail():
    assert euros(1) == "1"


@pytest.mark.skip
def test_skipped():
    pass
""",
    "pyproject.toml": '[tool.pytest.ini_options]\naddopts = "--strict-markers"\n',
    "README.md": "ledger\n",
}


LEDGER = FILES["ledger/__init__.py"]
BUGGY = LEDGER.replace("each + 1 if index < rest", "each + 1 if index <= rest")
FIX = "sed -i 's/index <= rest/index < rest/' ledger/__init__.py"
SPLIT_TESTS = ("10-3-expected0", "9-3-expected1", "0-2-expected2")
TASK = SweTask(
    instance_id="ledger-split",
    repo="ledger-1.0",
    schema="swe-smith",
    problem_statement="split is wrong",
    fail_to_pass=tuple(f"tests/test_ledger.py::test_split[{name}]" for name in SPLIT_TESTS),
    pass_to_pass=(
        "tests/test_ledger.py::test_balance",
        "tests/test_ledger.py::test_overdrawn",
        "tests/test_text.py::test_euros",
    ),
    gold_patch=file_diff("ledger/__init__.py", BUGGY, LEDGER),
    bug_patch=file_diff("ledger/__init__.py", LEDGER, BUGGY),
    package="ledger",
)
"""A task of the package `ledger`; `FIX` is a shell command that solves it."""


def write_files(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def make_package(folder: Path) -> Package:
    """The package `ledger` 1.0, pinned to the archive that this makes."""
    top = folder / "ledger-1.0"
    write_files(FILES, top)

    archive = folder / "ledger-1.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(top, arcname=top.name)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()

    return Package("ledger", "1.0", digest, ("ledger",), ("tests",), archive=archive)


def make_published(folder: Path) -> Path:
    """The sound package as a data set's image has it: earlier commits, a branch, files that git ignores."""
    write_files(FILES | {".gitignore": "*.egg-info/\n*.so\n"}, folder)
    script = """git init -q . && git config user.name a && git config user.email b
    git add -A && git commit -qm 'the fix' && git branch other && git commit -q --allow-empty -m later
    mkdir ledger.egg-info && echo 1.0 > ledger.egg-info/PKG-INFO && echo compiled > ledger/fast.so"""
    subprocess.run(["sh", "-ec", script], cwd=folder, check=True)
    open_to_all(folder)
    return folder

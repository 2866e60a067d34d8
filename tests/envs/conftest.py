"""A bubblewrap backend per module, a template, a file of SWE tasks, and a sandbox that must leave nothing behind.

A machine without bubblewrap fails these tests, with the line that says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from envs.sandbox import Sandbox, Template, missing_for_bubblewrap
from envs.sandbox.bubblewrap import STATE, BubblewrapBackend
from envs.swe.generate import write_tasks
from envs.swe.packages import PACKAGES
from tests.envs.repositories import TASK, make_package
from tests.envs.sandboxes import LIMITS, sh, world_writable


@pytest.fixture(scope="module")
def backend() -> Iterator[BubblewrapBackend]:
    missing = missing_for_bubblewrap()
    assert not missing, missing
    made = BubblewrapBackend(slots=8, threads=4)
    yield made
    made.close()


@pytest.fixture
def template(tmp_path: Path) -> Path:
    folder = world_writable(tmp_path / "template")
    for name in ("a.txt", "gone.txt"):
        (folder / name).write_text("original\n")
        (folder / name).chmod(0o666)
    return folder


@pytest.fixture
def ledger_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tasks of the package `ledger` in a file."""
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(PACKAGES, "ledger", make_package(tmp_path / "package"))
    path = tmp_path / "tasks.jsonl"
    write_tasks([replace(TASK, instance_id=f"ledger-{n}") for n in range(2)], path)
    return path


@pytest.fixture
def sandbox(backend: BubblewrapBackend, template: Path) -> Iterator[Sandbox]:
    """A sandbox beside which the host must be as before: same template, no process, no mount, next command fine."""
    before = {path.name: path.read_bytes() for path in template.iterdir()}
    made = backend.open(Template(template), LIMITS)
    yield made
    assert sh(made, "echo healthy").text() == "healthy\n"
    assert not backend.tree(0).processes()
    made.close()

    fresh = backend.open(Template(template), LIMITS)
    assert sh(fresh, "cat a.txt; ls -A /tmp ~").text() == "original\n/home/agent:\n\n/tmp:\n"
    fresh.close()
    assert {path.name: path.read_bytes() for path in template.iterdir()} == before
    assert str(STATE) not in Path("/proc/self/mountinfo").read_text() and not list(STATE.iterdir())

"""An import by a name of before says the new one, for users' own modules."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import rl.config.plugins as plugins
from rl.config.schema import ConfigError
from rl.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_each_old_name_fails_with_the_new_one_in_one_line(old: str) -> None:
    with pytest.raises(ImportError) as raised:
        importlib.import_module(old)

    message = str(raised.value)
    assert message.startswith(f"{old} is now {MOVED[old]}") and "\n" not in message


@pytest.mark.parametrize("new", sorted(set(MOVED.values())))
def test_each_new_name_is_there(new: str) -> None:
    assert importlib.util.find_spec(new) is not None


@pytest.mark.parametrize(
    "line", ["from rl.core.columns import Column", "import rl.core.columns", "from rl.core import columns"]
)
def test_a_plug_in_that_uses_an_old_name_is_refused_in_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "of_before.py").write_text(f"{line}\n\nMINE = 1\n")

    with pytest.raises(ConfigError) as raised:
        plugins.load("algo.columns", "of_before:MINE", {})
    assert "rl.core.columns is now rl.wire.columns" in str(raised.value) and "\n" not in str(raised.value)


def test_from_a_fresh_interpreter_too() -> None:
    said = subprocess.run([sys.executable, "-c", "import launch.run"], capture_output=True, text=True, timeout=60)
    assert said.returncode == 1 and "launch.run is now launch.commands.run" in said.stderr


def test_the_changelog_has_them_all() -> None:
    table = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
    assert [old for old, new in MOVED.items() if f"| `{old}` | `{new}` |" not in table] == []


def test_what_never_was_is_not_found_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"rl\.never"):
        importlib.import_module("rl.never")

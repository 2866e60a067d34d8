"""Hostile text of models, rows and logs, through everything that prints: no control character reaches a terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from launch import live
from launch.cli import main
from launch.summary import Observed
from launch.terminal import CleanConsole, clean, say
from tests.conftest import MakeRun

HOSTILE = "a\x1b]0;title\x07b\x1b[2Jc\x1b[31md\x9b31me\rf\x00g\x08h\u202ei\x1bPq\x1b\\"
OURS = re.compile(r"\x1b\[[0-9;]*m")  # rich's colours
BAD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def test_what_is_printed_shows_controls_as_text() -> None:
    file = io.StringIO()
    console = CleanConsole(file=file, force_terminal=True, color_system="truecolor", width=200)
    table = Table(HOSTILE)
    table.add_row(HOSTILE, Text(HOSTILE, style="red"))
    for shown in (HOSTILE, Text(HOSTILE, style="bold red"), table):
        console.print(shown, markup=False)
    say(HOSTILE, file)
    written = file.getvalue()
    assert "\x1b[" in written and not BAD.search(OURS.sub("", written)), repr(written)
    assert "\x1b[2J" not in written and "\x1b[31md" not in written and r"\x1b[2J" in written
    assert clean("plain\ttext\n äöü 漢字") == "plain\ttext\n äöü 漢字"


def test_the_supervisors_lines_are_clean(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run()
    display = live.Display(run, Observed(run.started_at, 0))
    display.note(HOSTILE)
    error = RuntimeError(HOSTILE)
    error.detail = HOSTILE  # type: ignore[attr-defined]
    display.close({}, error, False)
    assert "\\x1b]0;title" in (shown := capsys.readouterr().out) and not BAD.search(OURS.sub("", shown))


def test_a_bad_value_is_quoted_clean(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "simulated", f"env.name={HOSTILE}"]) == 2
    assert not BAD.search(capsys.readouterr().err)


def test_every_console_of_a_command_is_clean() -> None:
    """One place cleans: whoever prints text of others takes its console from there."""
    own = [path for path in Path("launch").rglob("*.py") if re.search(r"(?<!Clean)Console\(", path.read_text())]
    assert [str(path) for path in own] == ["launch/commands/plan.py", "launch/terminal.py"] or own == []

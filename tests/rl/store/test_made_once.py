"""Made once: by one of several processes, whole or not at all, and again after a maker was killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rl.store.made_once import cache_folder, digest, made_once

MAKER = """
import sys
from pathlib import Path
from rl.store.made_once import made_once, waited_s

def make(draft):
    draft.mkdir()
    (draft / "begun").touch()
    print("begun", flush=True)
    sys.stdin.read()  # until it is told to go on
    (draft / "whole").touch()
    print("made", flush=True)

made_once(Path(sys.argv[1]), make)
print("there" if (Path(sys.argv[1]) / "whole").exists() else "missing")
print("waited" if waited_s() > 0 else "worked")
"""


def start(target: Path) -> subprocess.Popen[str]:
    """A maker that has begun its thing waits for the end of its input."""
    command = [sys.executable, "-c", MAKER, str(target)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def never(draft: Path) -> None:
    raise AssertionError("made again")


def test_one_process_makes_it_and_the_others_say_that_they_wait(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    first = start(target)
    assert first.stdout is not None and first.stdout.readline() == "begun\n"
    others = [start(target) for _ in range(2)]
    said = [each.stderr.readline() for each in others if each.stderr is not None]
    assert said == ["waiting for thing, which another process makes\n"] * 2

    assert first.communicate(timeout=240)[0] == "made\nthere\nworked\n"
    assert [each.communicate(timeout=240) for each in others] == [("there\nwaited\n", "")] * 2
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [target]


def test_what_a_killed_maker_left_is_gone_after_the_next_one(tmp_path: Path) -> None:
    target = tmp_path / "thing"
    other = tmp_path / ".thing-2.draft-x"  # of a target whose name begins alike
    other.mkdir()
    killed = start(target)
    assert killed.stdout is not None and killed.stdout.readline() == "begun\n"
    killed.kill()
    killed.communicate()
    assert not target.exists() and len(list(tmp_path.glob(".thing.draft-*"))) == 1

    made_once(target, lambda draft: draft.write_text("by the next"))
    assert target.read_text() == "by the next"
    assert not list(tmp_path.glob(".thing.draft-*")) and other.exists()


def test_a_maker_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "thing"
    with pytest.raises(ValueError, match="no luck"):
        made_once(target, lambda draft: int("no luck"))
    assert not target.exists() and not list(target.parent.glob(".thing*"))

    made_once(target, lambda draft: draft.write_text("old"))
    with pytest.raises(AssertionError, match="made again"):
        made_once(target, never, fits=lambda path: path.exists() and path.read_text() == "new")
    assert target.read_text() == "old"


def test_what_fits_is_kept_and_what_does_not_is_replaced(tmp_path: Path) -> None:
    target = tmp_path / "thing"

    def make(draft: Path) -> None:
        draft.mkdir()
        (draft / "version").write_text("2")

    def fits(path: Path) -> bool:
        return (path / "version").exists() and (path / "version").read_text() == "2"

    target.mkdir()
    (target / "stale").touch()
    assert made_once(target, make, fits) == target
    assert [path.name for path in target.iterdir()] == ["version"]
    assert made_once(target, never, fits) == target


def test_the_digest_changes_with_options_and_with_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source.py"
    source.write_text("a = 1")
    before = digest("options", source)
    assert len(before) == 16 and digest("options", str(source)) == before != digest("other", source)
    source.write_text("a = 2")
    assert digest("options", source) != before

    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("FRESCO_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "fresco"

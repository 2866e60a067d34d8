"""`report`, `show`, `top` and `trace` on folders of runs with a damaged file: what can be read, or one line with its
name. Never a traceback."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.cli import main
from tests.launch.simulated_run import simulated_run

COMMANDS = (["report"], ["show"], ["top", "--once"], ["trace"])
TRIES = 5  # of each file


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return simulated_run(tmp_path_factory.mktemp("runs"), "tracking.trace=full", "tracking.replay=full")


def damaged(whole: bytes, chance: random.Random) -> bytes:
    """Cut off, with other bytes at some place, or with zeros from some place on, as file systems leave them."""
    if not whole:
        return bytes(chance.randbytes(20))
    place = chance.randrange(len(whole))
    length = min(chance.choice([1, 1, 4, 200]), len(whole) - place)
    match chance.randrange(4):
        case 0:
            return whole[:place]
        case 1:
            return whole[:place] + bytes(length) + whole[place + length :]
        case 2:
            return whole[:place] + chance.choice([b"9", b"-", b'"', b"}", b"null", b"x"]) + whole[place + 1 :]
        case _:
            return whole[:place] + chance.randbytes(length) + whole[place + length :]


def files(run: Path) -> Iterator[Path]:
    """One file of each kind."""
    kinds = {(path.parent, path.name.split(".")[0]): path for path in sorted(run.rglob("*")) if path.is_file()}
    yield from kinds.values()


@pytest.mark.docs
def test_a_damaged_file_is_never_a_traceback(played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(played, run)
    chance = random.Random(0)
    failed = []

    for path in files(run):
        whole = path.read_bytes()
        for attempt in range(TRIES):
            path.write_bytes(content := damaged(whole, chance))
            for command in COMMANDS:
                try:
                    code = main([command[0], str(run), *command[1:]])
                except Exception as error:
                    failed.append((path.relative_to(run), attempt, command[0], repr(error), len(content)))
                    continue
                told = capsys.readouterr()
                if code not in (0, 2) or "Traceback" in told.err or told.err.count("\n") != (code == 2):
                    failed.append((path.relative_to(run), attempt, command[0], told.err, len(content)))
        path.write_bytes(whole)
    assert not failed, "\n".join(map(str, failed))


@pytest.mark.parametrize(
    ("was", "now"), [(rb'"turns":\[\[\d+,\d+', b'"turns":[[2,9999'), (rb'"token_ids":\[', b'"token_ids":[-7,')]
)
def test_a_line_that_is_no_episode_is_left_out(
    played: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], was: bytes, now: bytes
) -> None:
    run = tmp_path / "run"
    shutil.copytree(played, run)
    for path in (run / "samples").glob("*.jsonl"):
        path.write_bytes(re.sub(was, now, path.read_bytes()))
    for command in (["show"], ["report"]):
        assert main([*command, str(run)]) == 0
    assert "no episode was kept" in capsys.readouterr().out

"""The folder of a run belongs to one run at a time."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest
from filelock import FileLock

from launch.cli import main
from launch.disk import Written
from launch.machine import this_machine
from launch.preflight import Preflight, make_run
from launch.prepare import Prepared
from rl.config.schema import ConfigError, load_config
from rl.wire.run import RunFile

FORK = multiprocessing.get_context("fork")
STARTS = 3
ROUNDS = 60


def test_a_name_belongs_to_one_run_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "simulated"
    folder.mkdir()
    (folder / "summary.json").write_text("{}")
    with FileLock(folder / "lock"):
        assert main(["run", "simulated", f"runs={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "fresco: name='simulated': a run of this name is going on; choose another name"
    assert (folder / "summary.json").exists(), "the run that is going on keeps its folder"


def start_every_round(runs: Path, begin: Barrier, told: Queue[tuple[int, str, str]], seen: Event) -> None:
    """One of several that start runs of the same names at the same moments; all of its runs go on until `seen`."""
    for number in range(ROUNDS):
        config = load_config(None, [f"runs={runs}", f"name=run-{number}"])
        begin.wait(60)
        try:
            run = make_run(
                Preflight(config, "cpu", [], Prepared(None, 0), [], Written(), 10, 10, {}, [], this_machine()), 0.0
            )
            told.put((number, "made", run.run_id))
        except ConfigError as error:
            told.put((number, "refused", str(error)))
        except Exception:
            told.put((number, "failed", traceback.format_exc()))
    seen.wait(60)


def test_of_several_starts_at_once_one_has_the_folder_and_the_others_are_told(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every other round an earlier run of that name is to be kept beside the new one."""
    # Of sockets' folders, which no supervisor removes here.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("sockets")))

    for number in range(0, ROUNDS, 2):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "lock").touch()
        (tmp_path / f"run-{number}" / "summary.json").touch()

    begin, told, seen = FORK.Barrier(STARTS), FORK.Queue(), FORK.Event()
    starts = [FORK.Process(target=start_every_round, args=(tmp_path, begin, told, seen)) for _ in range(STARTS)]
    for start in starts:
        start.start()
    try:
        results = [told.get(timeout=60) for _ in range(STARTS * ROUNDS)]
        for number in range(ROUNDS):
            name = f"run-{number}"
            of_round = sorted((what, text) for round_of, what, text in results if round_of == number)
            refused = f"name={name!r}: a run of this name is going on; choose another name"
            assert [what for what, _ in of_round] == ["made"] + ["refused"] * (STARTS - 1), of_round
            assert {text for _, text in of_round[1:]} == {refused}

            assert RunFile.load(tmp_path / name).run_id == of_round[0][1]
            assert (tmp_path / f"{name}.1" / "summary.json").exists() == (number % 2 == 0)
            assert not (tmp_path / f"{name}.2").exists()
        assert len(list(tmp_path.iterdir())) == ROUNDS + ROUNDS // 2, "nothing else is left behind"
    finally:
        seen.set()
        for start in starts:
            start.join(60)

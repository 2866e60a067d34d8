"""The file that says what a run is, read while it is written."""

from __future__ import annotations

import threading

from rl.wire.run import RunFile
from tests.conftest import MakeRun


def test_whoever_reads_while_it_is_saved_reads_a_whole_one(make_run: MakeRun) -> None:
    run = make_run()
    done = threading.Event()

    def save() -> None:
        while not done.is_set():
            run.save()

    writer = threading.Thread(target=save)
    writer.start()
    try:
        for _ in range(300):
            assert RunFile.load(run.folder).run_id == run.run_id
    finally:
        done.set()
        writer.join()

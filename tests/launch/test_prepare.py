"""The child that prepares a model."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

STARTER = """
from launch.prepare import prepare
from rl.config.schema import Config
prepare(Config.model_validate({"model": {"path": "tiny", "tiny": {"sft_steps": 100000}}}))
"""

WITHOUT_COPIES = """
import contextlib, sys
import launch.commands.run
from launch.cli import main
from launch.launcher.local import begin_process
launch.commands.run.begin_as_copies = lambda config: contextlib.nullcontext(begin_process)
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def inherited() -> Iterator[None]:
    """What a process is begun with: SIGINT ignored, as by a shell in the background; SIGHUP not, as outside nohup."""
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hang_up)


@pytest.mark.parametrize(
    ("end", "sharing"),
    [
        (signal.SIGINT, True),
        *(
            pytest.param(end, sharing, marks=pytest.mark.docs)
            for end, sharing in itertools.product((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), (True, False))
            if (end, sharing) != (signal.SIGINT, True)
        ),
    ],
)
def test_an_interrupted_warm_start_is_one_line_and_leaves_nothing(
    tmp_path: Path, end: signal.Signals, sharing: bool, inherited: None
) -> None:
    """With a fork server, of which the child is a copy, and without."""
    (tmp_path / "temporary").mkdir()
    changes = [f"runs={tmp_path / 'runs'}", "tracking.wandb=disabled", "model.tiny.sft_steps=100000"]
    fresco = ["-m", "launch.cli"] if sharing else ["-c", WITHOUT_COPIES]
    process = subprocess.Popen(
        [sys.executable, *fresco, "run", "experiments/math_cpu.yaml", *changes],
        env=os.environ | {"FRESCO_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path / "temporary")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        while "warm start" not in (line := process.stdout.readline()):
            assert line, "it ended"
        drafts = list((tmp_path / "cache").glob(".*"))
        below = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, end)  # as a terminal or a batch system does
        output, _ = process.communicate(timeout=240)
    finally:
        process.kill()  # its children die with it

    assert process.returncode == 130 and output.splitlines()[-1] == "fresco: interrupted"
    assert "Traceback" not in output
    _, alive = psutil.wait_procs(below, timeout=60)
    assert drafts and below and not alive
    assert not list((tmp_path / "cache").glob(".*")) and not list((tmp_path / "temporary").iterdir())


def test_it_ends_with_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FRESCO_CACHE", str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", STARTER], stderr=subprocess.PIPE)
    assert parent.stderr is not None and b"warm start" in parent.stderr.readline()  # the child is at work
    (child,) = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait(60)
    gone, _ = psutil.wait_procs([child], timeout=240)
    assert gone

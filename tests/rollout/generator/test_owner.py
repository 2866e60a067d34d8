"""What stands below a generator ends with it, whenever it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from rollout.generator.engines.owner import OWNER_VARIABLE

WORKER = "import time; from rollout.generator.engines.owner import die_with_owner; die_with_owner(); time.sleep(60)"


ENGINE = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {WORKER!r}]).returncode)"


def test_a_generator_that_died_before_its_engine_could_watch_it() -> None:
    """The worker of a tensor-parallel engine ends the engine's process, which is its parent, and itself."""
    generator = subprocess.Popen(["true"])
    generator.wait()
    engine = subprocess.Popen([sys.executable, "-c", ENGINE], env=os.environ | {OWNER_VARIABLE: str(generator.pid)})
    assert engine.wait(60) == -signal.SIGKILL

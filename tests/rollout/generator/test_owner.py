"""What stands below a generator ends with it, whenever it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from rollout.generator.engines.owner import OWNER_VARIABLE

BELOW = "import time; from rollout.generator.engines.owner import die_with_owner; die_with_owner(); time.sleep(60)"


def test_a_generator_that_died_before_its_engine_could_watch_it() -> None:
    generator = subprocess.Popen(["true"])
    generator.wait()
    below = subprocess.Popen([sys.executable, "-c", BELOW], env=os.environ | {OWNER_VARIABLE: str(generator.pid)})
    assert below.wait(60) == -signal.SIGKILL
